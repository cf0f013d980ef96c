"""The adapter of SGLang, on the calling contract of its `eagle_sample`; where SGLang is installed, against that function."""

import sys
from types import SimpleNamespace as Namespace
from unittest.mock import Mock

import pytest
import torch
from scipy.stats import chisquare

from specdecode import Sampling, sample
from specdecode.integrations import engines, sglang
from specdecode.integrations.sglang import EagleSample

METHODS = ["probabilistic", "block", "strict"]
ALL_TOKENS = 1 << 30
"""How SGLang says that top-k keeps all tokens."""


def engine(rejection_sampling=False, threshold=1.0, simulated=False, world_size=1):
    """What SGLang answers."""
    settings = Namespace(
        speculative_use_rejection_sampling=rejection_sampling,
        speculative_accept_threshold_single=threshold,
        speculative_accept_threshold_acc=1.0,
    )
    ranks = Namespace(world_size=world_size, broadcast=Mock())
    return Namespace(
        settings=lambda: settings,
        simulates_acceptance=lambda: simulated,
        sanitize_nan_logits=Mock(),
        ranks=lambda: ranks,
    )


def chain(drafts, draft_probs=None):
    """SGLang's verify input for drafts [batch, num_draft_tokens]; token 3 is each request's last."""
    batch, num_draft_tokens = drafts.shape
    last = torch.full((batch, 1), 3)
    return Namespace(
        draft_token=torch.cat([last, drafts], dim=1).flatten(),
        draft_token_num=num_draft_tokens + 1,
        max_tree_depth=num_draft_tokens + 1,
        tree_topk=1,
        draft_probs=draft_probs,
    )


def batch_of(temperature, top_k=None, top_p=None, min_p=None, seeds=None, lengths=None):
    """SGLang's batch: temperature 0 is written as temperature 1 and top-k 1."""
    greedy = temperature == 0
    top_ks = torch.where(greedy, 1, ALL_TOKENS if top_k is None else top_k).to(torch.int32)
    info = Namespace(
        temperatures=torch.where(greedy, 1, temperature)[:, None],
        top_ks=top_ks,
        top_ps=torch.full_like(temperature, 1.0 if top_p is None else top_p),
        min_ps=torch.full_like(temperature, 0.0 if min_p is None else min_p),
        sampling_seed=seeds,
        is_all_greedy=bool(greedy.all()),
        need_top_k_sampling=bool((top_ks != ALL_TOKENS).any()),
        need_top_p_sampling=top_p is not None,
        need_min_p_sampling=min_p is not None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=None,
        has_watermark_candidates=False,
    )
    return Namespace(
        forward_mode=Namespace(is_idle=lambda: False),
        seq_lens=torch.full_like(temperature, 7, dtype=torch.int64) if lengths is None else lengths,
        sampling_info=info,
        reqs=[Namespace(sampling_params=Namespace(top_k=each)) for each in top_ks.tolist()],
    )


def logits_output(logits):
    return Namespace(next_token_logits=logits.flatten(0, 1))


def emitted(predict, accept_lens, accept_index):
    """Read the results as SGLang does: through accept_index."""
    rows = [row[:count] for row, count in zip(accept_index.tolist(), accept_lens.tolist())]
    return [[int(predict[row]) for row in each] for each in rows]


def never(*_, **__):
    raise AssertionError("the step was left to SGLang")


def drafted(batch=40, num_draft_tokens=3, vocab=50, scale=1.0, seed=0):
    """Logits, and drafts most of which are the argmax."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(batch, num_draft_tokens + 1, vocab, generator=generator)
    drafts = logits[:, :-1].argmax(dim=-1)
    others = torch.randint(0, vocab, drafts.shape, generator=generator)
    return logits, torch.where(torch.rand(drafts.shape, generator=generator) < 0.3, others, drafts)


# ---- What is verified here -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rejection_sampling", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_emit_what_the_contract_says(method, rejection_sampling):
    logits, drafts = drafted()
    draft_probs = torch.rand(40, 3, 50) if rejection_sampling else None
    hook = EagleSample(method, engine(rejection_sampling))
    output = logits_output(logits)
    results = hook(never, chain(drafts, draft_probs), batch_of(torch.zeros(40), top_p=0.5), output)
    predict, accept_lens, accept_index = results
    assert [each.dtype for each in results] == [torch.int32] * 3
    assert [each.shape for each in results] == [(160,), (40,), (40, 4)]
    expected = []
    for own, best in zip(drafts.tolist(), logits.argmax(dim=-1).tolist()):
        accepted = 0
        while accepted < 3 and own[accepted] == best[accepted]:
            accepted += 1
        expected.append(best[: accepted + 1])
    assert emitted(*results) == expected
    for request, count in enumerate(accept_lens.tolist()):
        rows = list(range(4 * request, 4 * request + count))
        assert accept_index[request].tolist() == rows + [-1] * (4 - count)
        assert not predict[4 * request + count : 4 * request + 4].any()
    assert {len(row) for row in expected} == {1, 2, 3, 4}


def test_strict_emits_what_plain_sampling_says_whatever_is_drafted():
    logits, drafts = drafted(scale=4.0)
    temperature, truncation = torch.linspace(0, 2, 40), {"top_p": 0.9, "min_p": 0.01}
    seeds, lengths = torch.arange(40) * 7919, torch.arange(40) + 5
    batch = batch_of(temperature, seeds=seeds, lengths=lengths, **truncation)
    hook = EagleSample("strict", engine(rejection_sampling=True))
    results = hook(never, chain(drafts, draft_probs=torch.rand(40, 3, 50)), batch, logits_output(logits))
    for i in range(4):
        own = sample(logits[:, i], temperature, seeds, lengths + 1 + i, **truncation)
        reached = results[1] > i
        assert reached.any()
        assert torch.equal(results[0].view(40, 4)[reached, i].long(), own[reached])


@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_drafts_from_probabilities_are_verified_for_a_truncated_target(method):
    requests, vocab = 20_000, 6
    generator = torch.Generator().manual_seed(5)
    target, draft = 0.7 * torch.randn(2, vocab, generator=generator)
    temperature = torch.tensor([0.6, 1.4]).repeat(requests // 2)
    draft_probs = (draft / 0.9).softmax(dim=0).expand(requests, 1, vocab)  # at a temperature of its own
    drafts = torch.multinomial(draft_probs[:, 0], 1, generator=generator)
    batch = batch_of(temperature, top_k=4, top_p=0.9, seeds=torch.arange(requests))
    hook = EagleSample(method, engine(rejection_sampling=True))
    predict, _accept_lens, _ = hook(
        never, chain(drafts, draft_probs), batch, logits_output(target.repeat(requests, 2, 1))
    )
    for kind, at in enumerate((0.6, 1.4)):
        weights, order = (target.double() / at).softmax(dim=0).sort(descending=True)
        weights[4:] = 0
        weights /= weights.sum()
        weights[weights.cumsum(0) - weights >= 0.9] = 0
        seen = predict.view(requests, 2)[kind::2, 0].bincount(minlength=vocab)[order]
        kept = weights > 0
        assert 1 < kept.sum() < vocab
        assert seen[~kept].sum() == 0
        expected = weights[kept] / weights.sum() * (requests // 2)
        assert chisquare(seen[kept].numpy(), expected.numpy()).pvalue > 1e-6


def arguments(method, batch, rejection_sampling=False, draft_probs=None):
    """Return what the sampler is called with."""
    logits, drafts = drafted()
    hook = EagleSample(method, engine(rejection_sampling))
    verifier = hook.verifier
    hook.verifier = Mock(method=method, side_effect=verifier)
    output = logits_output(logits)
    hook(never, chain(drafts, draft_probs), batch, output)
    arguments = hook.verifier.call_args.kwargs
    assert arguments["target_logits"].data_ptr() == output.next_token_logits.data_ptr()  # not copied
    assert torch.equal(arguments["draft_token_ids"], drafts)
    return arguments


def test_the_draft_logits_are_exactly_the_given_probabilities():
    draft_probs = torch.rand(40, 3, 50).softmax(dim=-1)
    draft_probs[:, :, 7] = 0
    temperature = torch.linspace(0, 2, 40)
    got = arguments("probabilistic", batch_of(temperature), rejection_sampling=True, draft_probs=draft_probs)
    drawn = got["temperature"] > 0
    assert drawn.tolist() == [False] + [True] * 39
    weights = (got["draft_logits"][drawn].double() / got["temperature"][drawn, None, None]).exp()
    torch.testing.assert_close(weights, draft_probs[drawn].double(), rtol=1e-5, atol=1e-12)
    assert not got["draft_logsumexp"].any()
    assert not got["draft_logits"][0].isnan().any()
    assert "draft_sampling" not in got
    got = arguments("probabilistic", batch_of(temperature, top_p=0.9), rejection_sampling=True, draft_probs=draft_probs)
    assert got["draft_sampling"] == Sampling(temperature=got["temperature"])


def test_without_rejection_sampling_and_for_strict_no_draft_probability_is_read():
    assert "draft_logits" not in arguments("block", batch_of(torch.ones(40)))
    assert "draft_logits" not in arguments("strict", batch_of(torch.ones(40)), rejection_sampling=True)


def test_truncation_is_passed_if_a_request_that_is_not_greedy_truncates():
    mixed = torch.tensor([0.0, 0.8]).repeat(20)
    names = {"top_k", "top_p", "min_p"}
    assert not names & set(arguments("strict", batch_of(mixed)))  # though SGLang says top-k 1 for greedy requests
    assert not names & set(arguments("strict", batch_of(0 * mixed, top_p=0.9, min_p=0.1)))
    for name, value in {"top_k": 5, "top_p": 0.9, "min_p": 0.1}.items():
        got = arguments("strict", batch := batch_of(mixed, **{name: value}))
        assert all(got[each] is getattr(batch.sampling_info, f"{each}s") for each in names)
    assert not names & set(arguments("strict", batch_of(mixed, top_k=50)))  # the whole vocabulary


def test_kernels_are_compiled_truncated_and_not_at_the_first_call_of_a_kind(caplog):
    caplog.set_level("INFO", logger="specdecode")
    logits, drafts = drafted()
    hook, batch = EagleSample("block", engine(rejection_sampling=True)), batch_of(torch.ones(40))
    hook.verifier = Mock(wraps=(real := hook.verifier), method="block")
    for _ in range(2):
        hook(never, chain(drafts, torch.rand(40, 3, 50)), batch, logits_output(logits))
    plain, truncated = [call.kwargs for call in hook.verifier.warmup.call_args_list]
    assert set(truncated) - set(plain) == {"top_k", "top_p", "min_p", "draft_sampling"}
    for call in (plain, truncated):
        assert call["draft_logits"].shape == (1, 3, 50)
        assert real(**call).token_ids.shape == (1, 4)
    assert [record.getMessage() for record in caplog.records] == ["specdecode: 'block' verifies draft chains"]


def test_grammar_masks_are_applied_first_and_logits_are_checked_as_sglang_does():
    logits, drafts = drafted()
    mask, output, answers = Mock(), logits_output(logits), engine()
    mask.apply.side_effect = lambda rows: rows[:, 10:].fill_(-torch.inf)
    results = EagleSample("probabilistic", answers)(never, chain(drafts), batch_of(torch.ones(40)), output, mask)
    assert max(max(row) for row in emitted(*results)) < 10
    answers.sanitize_nan_logits.assert_called_once_with(output.next_token_logits)


def test_ranks_that_must_agree_are_sent_the_results_of_the_first():
    logits, drafts = drafted()
    answers = engine(world_size=2)
    results = EagleSample("strict", answers)(never, chain(drafts), batch_of(torch.ones(40)), logits_output(logits))
    sent = answers.ranks().broadcast.call_args_list
    assert [call.args[0] is result for call, result in zip(sent, results)] == [True] * 3
    assert all(call.kwargs == {"src": 0} for call in sent)


# ---- What is left to SGLang ------------------------------------------------------------------------------------------

REASONS = {
    "a tree of drafts": {"tree_topk": 4},
    "a tree": {"max_tree_depth": 3},
    "a tree of": {"uno_target_max_top_k": 8},
    "watermarks": {"has_watermark_candidates": True, "watermark_state": object()},
    "penalties": {"acc_additive_penalties": torch.zeros(40, 50)},
    "penalties or": {"acc_scaling_penalties": torch.ones(40, 50)},
    "penalties or logit_bias": {"logit_bias": torch.zeros(40, 50)},
    "speculative_accept_threshold_single": {"threshold": 0.9},
    "SGLANG_SIMULATE_ACC_LEN": {"simulated": True},
}


@pytest.mark.parametrize("reason", REASONS)
def test_steps_that_need_more_go_sglangs_own_way_and_are_counted(reason, caplog):
    logits, drafts = drafted()
    change = dict(REASONS[reason])
    options = {name: change.pop(name) for name in ("uno_target_max_top_k", "watermark_state") if name in change}
    hook = EagleSample(
        "block", engine(**{name: change.pop(name) for name in ("threshold", "simulated") if name in change})
    )
    verify_input, batch, output, mask = chain(drafts), batch_of(torch.ones(40)), logits_output(logits), Mock()
    for name, value in change.items():
        setattr(verify_input if hasattr(verify_input, name) else batch.sampling_info, name, value)
    original, before = Mock(), logits.clone()
    for _ in range(3):
        result = hook(original, verify_input, batch, output, mask, **options, watermark_full_mask=False)
        assert result is original.return_value
    assert original.call_args.args == (verify_input, batch, output, mask, options.get("uno_target_max_top_k"))
    watermark_state = options.get("watermark_state")
    assert original.call_args.kwargs == {"watermark_state": watermark_state, "watermark_full_mask": False}
    assert torch.equal(logits, before)
    assert not mask.apply.called  # SGLang's function applies it
    ((counted, steps),) = hook.fallbacks.items()
    assert counted.startswith(reason)
    assert steps == 3
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_idle_batches_go_to_sglang_and_are_not_counted():
    hook, original = EagleSample("strict", engine()), Mock()
    idle = Namespace(forward_mode=Namespace(is_idle=lambda: True))
    assert hook(original, Namespace(), idle, Namespace()) is original.return_value
    assert not hook.fallbacks


# ---- Switching it on -------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """A module in the place of SGLang's registry of hooks."""
    name = "sglang.srt.plugins.hook_registry"
    module = Namespace(HookRegistry=Mock(), HookType=Namespace(AROUND="around"))
    for parent in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, parent, Namespace(__path__=[]))
    monkeypatch.setitem(sys.modules, name, module)
    return module.HookRegistry


def test_nothing_is_registered_without_the_environment_variable(registry, monkeypatch):
    monkeypatch.delenv(engines.SGLANG_SWITCH, raising=False)
    engines.register_sglang()
    assert not registry.method_calls


def test_the_environment_variable_registers_a_hook_around_sglangs_function(registry, monkeypatch):
    monkeypatch.setenv(engines.SGLANG_SWITCH, "block")
    engines.register_sglang()
    ((target, hook, kind),) = [call.args for call in registry.register.call_args_list]
    assert (target, kind) == (sglang.TARGET, "around")
    assert hook.verifier.method == "block"


def test_another_value_ends_the_process(registry, monkeypatch):
    monkeypatch.setenv(engines.SGLANG_SWITCH, "greedy")
    with pytest.raises(
        SystemExit, match=r"SPECDECODE_SGLANG: expected one of 'probabilistic', 'block', 'strict'.*'greedy'"
    ):
        engines.register_sglang()
    assert not registry.method_calls


# ---- Against SGLang's own function -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_emit_what_sglang_emits(method):
    name = "sglang.kernels.ops.speculative.spec_tree"
    kernels = pytest.importorskip(name, reason="SGLang is not installed", exc_type=ImportError)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, drafts = drafted()
    verify_input, batch = chain(drafts), batch_of(torch.zeros(40, device=device))
    verify_input.draft_token = verify_input.draft_token.to(device)
    ours = EagleSample(method, engine())(never, verify_input, batch, logits_output(logits.to(device)))
    rows = torch.arange(160, device=device).view(40, 4)
    follows = torch.tensor([1, 2, 3, -1], device=device).expand(40, 4).contiguous()
    predict, accept_index, num_accepted = kernels.verify_tree_greedy_func(
        predicts=torch.zeros(160, dtype=torch.int32, device=device),
        accept_index=torch.full((40, 4), -1, dtype=torch.int32, device=device),
        accept_token_num=torch.empty(40, dtype=torch.int32, device=device),
        candidates=verify_input.draft_token.view(40, 4),
        retrieve_index=rows,
        retrieve_next_token=follows,
        retrieve_next_sibling=torch.full_like(follows, -1),
        target_predict=logits.argmax(dim=-1).to(device),
        topk=1,
    )
    assert torch.equal(ours[1], num_accepted + 1)
    assert torch.equal(ours[2], accept_index)
    assert emitted(*ours) == emitted(predict, num_accepted + 1, accept_index)
