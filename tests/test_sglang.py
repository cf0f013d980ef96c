"""The adapter of SGLang, on the calling contract of its `eagle_sample`; where SGLang is installed, against that function.

Where FlashInfer is installed, its verification of chains is compared, too.
"""

import sys
from collections import Counter
from itertools import product
from types import SimpleNamespace as Namespace
from typing import get_args
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from specdecode import RejectionSampler, Sampling, backends, integrations, sample, sampler
from specdecode.arguments import check_verification
from specdecode.batch import VerificationBatch
from specdecode.integrations import sglang
from specdecode.integrations.engine import EngineMethod
from specdecode.integrations.sglang import EagleSample
from tests.conftest import HAS_TRITON, ON_GPU
from tests.support import distributions

METHODS = list(get_args(EngineMethod))
DEVICE = "cuda" if ON_GPU else "cpu"
ALL_TOKENS = 1 << 30
"""SGLang's value of top-k that keeps all tokens."""


def engine(rejection_sampling=False, threshold=1.0, threshold_acc=1.0, simulated=False, world_size=1):
    """Return a stand-in for SGLang's state."""
    settings = Namespace(
        speculative_use_rejection_sampling=rejection_sampling,
        speculative_accept_threshold_single=threshold,
        speculative_accept_threshold_acc=threshold_acc,
    )
    ranks = Namespace(world_size=world_size, broadcast=Mock())
    return Namespace(
        settings=lambda: settings,
        simulates_acceptance=lambda: simulated,
        sanitize_nan_logits=Mock(),
        ranks=lambda: ranks,
    )


def chain(drafts, draft_probs=None):
    """Return SGLang's verify input for drafts [batch, num_draft_tokens]; token 3 is each request's last."""
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
    """Return SGLang's batch; temperature 0 is written as temperature 1 and top-k 1."""
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
    predict = predict.tolist()
    return [[predict[row] for row in each] for each in rows]


def never(*_, **__):
    raise AssertionError("the step was left to SGLang")


def drafted(batch=40, num_draft_tokens=3, vocab=50, scale=1.0, seed=0):
    """Return logits, and drafts that are mostly the argmax."""
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(batch, num_draft_tokens + 1, vocab, generator=generator)
    drafts = logits[:, :-1].argmax(dim=-1)
    others = torch.randint(0, vocab, drafts.shape, generator=generator)
    return logits, torch.where(torch.rand(drafts.shape, generator=generator) < 0.3, others, drafts)


# ---- Steps verified here ---------------------------------------------------------------------------------------------


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
    draft_probs = (draft / 0.9).softmax(dim=0).expand(requests, 1, vocab)  # at its own temperature
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


@pytest.mark.parametrize("proposal", ["whole", "top-k", "the target's own", "point masses"])
@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_steps_are_distributed_as_the_method_says_whatever_the_probabilities_of_drafts(method, proposal):
    requests, generator = 20_000, torch.Generator().manual_seed(9)
    target, draft = torch.randn(2, DRAFTS + 1, VOCAB, generator=generator)
    target_probs, draft_probs = (target.double() / 0.7).softmax(dim=1), draft[:-1].double().softmax(dim=1)
    if proposal == "top-k":
        draft_probs = kept(draft_probs, top_k=2)
    elif proposal == "the target's own":
        draft_probs = target_probs[:-1]
    drafts = torch.multinomial(draft_probs, requests, replacement=True, generator=generator).T
    given, rule = draft_probs.expand(requests, DRAFTS, VOCAB), method
    if proposal == "point masses":  # SGLang's fallback for drafts of another server without their probabilities
        given, rule = torch.nn.functional.one_hot(drafts, VOCAB), "one-hot"
    batch = batch_of(torch.full((requests,), 0.7), seeds=torch.arange(requests))
    hook, output = EagleSample(method, engine(rejection_sampling=True)), logits_output(target.repeat(requests, 1, 1))
    results = hook(never, chain(drafts, given.float().contiguous()), batch, output)
    exact = distribution_of_steps(rule, target_probs, draft_probs)
    distributions.assert_distribution(counts_of(emitted(*results)), exact)


def arguments(method, batch, rejection_sampling=False, draft_probs=None):
    """Return the arguments of the sampler's call."""
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


def test_requests_have_other_noise_at_each_position_and_other_seeds_when_they_change():
    hook, flat = EagleSample("strict", engine()), torch.zeros(200, 2, 50)
    drafts, batch = torch.zeros(200, 1, dtype=torch.int64), batch_of(torch.full((200,), 0.8))

    def tokens():
        return hook(never, chain(drafts), batch, logits_output(flat))[0].view(200, 2)[:, 0].tolist()

    first, requests = tokens(), hook.requests
    batch.seq_lens = batch.seq_lens + 1
    assert tokens() != first
    assert hook.requests is requests
    batch.seq_lens = batch.seq_lens - 1
    assert tokens() == first
    batch.sampling_info.top_ks = batch.sampling_info.top_ks.clone()
    assert tokens() != first
    assert hook.requests is not requests
    batch.sampling_info.top_ks = torch.ones_like(batch.sampling_info.top_ks)
    assert tokens() == [0] * 200  # greedy


@pytest.mark.parametrize("width", [None, 47])
@pytest.mark.parametrize("method", METHODS)
def test_steps_of_greedy_requests_need_no_draft_probabilities(method, width):
    logits, drafts = drafted()
    draft_probs = None if width is None else torch.rand(40, 3, width)  # SGLang passes None
    results = EagleSample(method, engine(rejection_sampling=True))(
        never, chain(drafts, draft_probs), batch_of(torch.zeros(40)), logits_output(logits)
    )
    plain = EagleSample(method, engine())(never, chain(drafts), batch_of(torch.zeros(40)), logits_output(logits))
    assert all(torch.equal(*each) for each in zip(results, plain, strict=True))


@pytest.mark.parametrize("width", [None, 47])
def test_drawn_drafts_without_probabilities_of_the_targets_vocabulary_are_left_to_sglang(width):
    logits, drafts = drafted()
    verify_input = chain(drafts, None if width is None else torch.rand(40, 3, width))
    batch, output = batch_of(torch.linspace(0, 1, 40)), logits_output(logits)
    for method in ("probabilistic", "block"):
        hook, original = EagleSample(method, engine(rejection_sampling=True)), Mock()
        assert hook(original, verify_input, batch, output) is original.return_value
        assert list(hook.fallbacks) == ["drawn drafts without probabilities of the target's vocabulary"]
    EagleSample("strict", engine(rejection_sampling=True))(never, verify_input, batch, output)


def test_truncation_is_passed_if_a_request_that_is_not_greedy_truncates():
    mixed = torch.tensor([0.0, 0.8]).repeat(20)
    names = {"top_k", "top_p", "min_p"}
    assert not names & set(arguments("strict", batch_of(mixed)))  # though SGLang says top-k 1 for greedy requests
    assert not names & set(arguments("strict", batch_of(0 * mixed, top_p=0.9, min_p=0.1)))
    for name, value in {"top_k": 5, "top_p": 0.9, "min_p": 0.1}.items():
        got = arguments("strict", batch := batch_of(mixed, **{name: value}))
        assert all(got[each] is getattr(batch.sampling_info, f"{each}s") for each in names)
    assert not names & set(arguments("strict", batch_of(mixed, top_k=50)))  # the whole vocabulary


@pytest.mark.parametrize("rejection_sampling", [False, True])
def test_all_kernels_are_compiled_at_the_first_call_which_is_greedy(rejection_sampling, caplog):
    caplog.set_level("INFO", logger="specdecode")
    logits, drafts = drafted()
    hook = EagleSample("block", engine(rejection_sampling))
    hook.verifier = Mock(wraps=(real := hook.verifier), method="block", shard=None)
    draft_probs = torch.rand(40, 3, 50) if rejection_sampling else None
    for at, probs, top_p in ((0, None, None), (1, draft_probs, None), (1, draft_probs, 0.9)):
        batch = batch_of(torch.full((40,), float(at)), top_p=top_p)
        hook(never, chain(drafts, probs), batch, logits_output(logits))
    warmed = [call.kwargs for call in hook.verifier.warmup.call_args_list]
    called = [call.kwargs for call in hook.verifier.call_args_list]
    assert {frozenset(each) for each in called} == {frozenset(each) for each in warmed}
    for call in warmed:
        assert real(**call).token_ids.shape == (1, 4)
        if "draft_logits" in call:
            assert call["draft_logits"].shape == (1, 3, 50)
            assert call["draft_logits"].dtype == called[-1]["draft_logits"].dtype
    assert [record.getMessage() for record in caplog.records] == ["specdecode: 'block' verifies draft chains"]


def test_grammar_masks_are_applied_first_and_logits_are_checked_as_sglang_does():
    logits, drafts = drafted()
    mask, output, answers = Mock(), logits_output(logits), engine()
    mask.apply.side_effect = lambda rows: rows[:, 10:].fill_(-torch.inf)
    results = EagleSample("probabilistic", answers)(never, chain(drafts), batch_of(torch.ones(40)), output, mask)
    assert max(max(row) for row in emitted(*results)) < 10
    answers.sanitize_nan_logits.assert_called_once_with(output.next_token_logits)


@pytest.mark.parametrize("method", METHODS)
def test_penalties_and_biases_are_those_of_all_rows_of_a_request(method):
    """In SGLang's order: the terms, the factor of negative and divisor of positive logits, the bias."""
    logits, drafts = drafted()
    generator = torch.Generator().manual_seed(1)
    added, bias = torch.randn(2, 40, 50, generator=generator)
    factors = 0.5 + torch.rand(40, 50, generator=generator)
    penalized = logits + added[:, None]
    penalized = torch.where(penalized < 0, penalized * factors[:, None], penalized / factors[:, None]) + bias[:, None]
    seeds, output = torch.arange(40), logits_output(logits.clone())
    batch, plain = (batch_of(torch.arange(40) % 2 * 0.8, seeds=seeds) for _ in range(2))
    batch.sampling_info.acc_additive_penalties = added
    batch.sampling_info.acc_scaling_penalties, batch.sampling_info.logit_bias = factors, bias
    hook = EagleSample(method, engine())
    results = hook(never, chain(drafts), batch, output)
    assert torch.equal(
        output.next_token_logits, penalized.flatten(0, 1)
    )  # SGLang computes log-probabilities from these
    assert emitted(*results) == emitted(*hook(never, chain(drafts), plain, logits_output(penalized)))
    assert emitted(*results) != emitted(*hook(never, chain(drafts), plain, logits_output(logits)))


def test_ranks_that_must_agree_are_sent_the_results_of_the_first():
    logits, drafts = drafted()
    answers = engine(world_size=2)
    results = EagleSample("strict", answers)(never, chain(drafts), batch_of(torch.ones(40)), logits_output(logits))
    sent = answers.ranks().broadcast.call_args_list
    assert [call.args[0] is result for call, result in zip(sent, results)] == [True] * 3
    assert all(call.kwargs == {"src": 0} for call in sent)
    answers = engine(world_size=2)
    EagleSample("strict", answers)(never, chain(drafts), batch_of(torch.zeros(40)), logits_output(logits))
    answers.ranks().broadcast.assert_not_called()  # greedy: equal on all ranks


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}], ids=["whole rows", "truncated"])
@pytest.mark.parametrize("rejection_sampling", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_steps_that_are_not_checked_again_pass_on_what_checked_ones_do(
    method, rejection_sampling, truncation, seeded, monkeypatch
):
    logits, drafts = drafted()
    draft_probs = torch.rand(40, 3, 50).softmax(dim=-1) if rejection_sampling else None
    seeds = torch.arange(40) if seeded else None
    request = batch_of(
        torch.full((40,), 0.7), **{name: torch.tensor(value) for name, value in truncation.items()}, seeds=seeds
    )
    passed, choose = [], backends.verifier_of

    def note(backend, method, batch):
        passed.append(batch)
        return choose(backend, method, batch)

    hook = EagleSample(method, engine(rejection_sampling))
    hook(never, chain(drafts, draft_probs), request, logits_output(logits))  # compiles, is checked
    monkeypatch.setattr(backends, "verifier_of", note)
    checks = Mock(side_effect=check_verification)
    monkeypatch.setattr(sampler, "check_verification", checks)
    hook.checked.clear()
    for _ in range(2):
        hook(never, chain(drafts, draft_probs), request, logits_output(logits))
    assert checks.call_count == 1
    for name, first, second in zip(VerificationBatch._fields, *passed):
        if name == "seeds" and not seeded:
            assert (first.shape, first.dtype) == (second.shape, second.dtype)
        else:
            torch.testing.assert_close(first, second, rtol=0, atol=0, msg=name)


# ---- Trees -----------------------------------------------------------------------------------------------------------

TREE = [-1, 0, 0, 1, 1, 2, 3], [3, 0, 1, 2, 0, 1, 1]
"""Parents and tokens of a tree of depth 3, over four tokens."""
OTHER_TREE = [-1, 0, 1, -1, 2, 0, 0], [3, 2, 2, 1, 3, 0, 3]
"""Another tree, in which node 3 is padding."""
TREE_DEPTH = 3


def tree(token_ids, parents, max_depth=TREE_DEPTH, topk=4):
    """Return SGLang's verify input for trees [batch, nodes]; the children of a node are linked in order, as in SGLang.

    Nodes with parent -1 are not linked.
    """
    requests, nodes = token_ids.shape
    next_token, next_sibling = torch.full((2, requests, nodes), -1)
    for request, node in product(range(requests), range(nodes - 1, 0, -1)):
        before = int(parents[request, node])
        if before >= 0:
            next_sibling[request, node] = next_token[request, before]
            next_token[request, before] = node
    return Namespace(
        draft_token=token_ids.flatten(),
        draft_token_num=nodes,
        max_tree_depth=max_depth + 1,
        tree_topk=topk,
        draft_probs=None,
        retrieve_next_token=next_token,
        retrieve_next_sibling=next_sibling,
    )


def repeated(verify_input, times):
    """Return the trees of a verify input, repeated `times` times."""
    tensors = {name: each for name, each in vars(verify_input).items() if isinstance(each, torch.Tensor)}
    tensors = {name: each.repeat(times, *[1] * (each.ndim - 1)).to(DEVICE) for name, each in tensors.items()}
    return Namespace(**vars(verify_input) | tensors)


def drafted_trees(batch=40, nodes=9, vocab=50, seed=0):
    """Return logits, token ids and parents of different trees: children are likely tokens, one node in eight is padding."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(batch, nodes, vocab, generator=generator)
    likeliest = logits.topk(3, dim=-1).indices
    token_ids, parents = torch.full((batch, nodes), 3), torch.full((batch, nodes), -1)
    for request, node in product(range(batch), range(1, nodes)):
        before, rank = (int(torch.randint(0, most, (), generator=generator)) for most in (node, 3))
        if torch.rand((), generator=generator) < 7 / 8:
            parents[request, node] = before
        token_ids[request, node] = likeliest[request, before, rank]
    return logits, token_ids, parents


def walked(verify_input, own):
    """Return the accepted nodes and the tokens of a walk through SGLang's links; `own(request, node, depth)` is a token."""
    nodes_of, tokens_of = [], []
    candidates = verify_input.draft_token.view(-1, verify_input.draft_token_num)
    for request, ids in enumerate(candidates.tolist()):
        nodes, tokens = [0], [own(request, 0, 0)]
        while len(tokens) < verify_input.max_tree_depth:
            child = int(verify_input.retrieve_next_token[request, nodes[-1]])
            while child >= 0 and ids[child] != tokens[-1]:
                child = int(verify_input.retrieve_next_sibling[request, child])
            if child < 0:
                break
            nodes.append(child)
            tokens.append(own(request, child, len(nodes) - 1))
        nodes_of.append(nodes)
        tokens_of.append(tokens)
    return nodes_of, tokens_of


def assert_walked(results, verify_input, own):
    """Assert that results have SGLang's layout and equal the walk; return the number of tokens of each."""
    predict, accept_lens, accept_index = results
    width, num_nodes = verify_input.max_tree_depth, verify_input.draft_token_num
    assert [each.dtype for each in results] == [torch.int32] * 3
    assert [each.shape for each in results] == [(len(predict),), (len(accept_lens),), (len(accept_lens), width)]
    assert len(predict) == len(accept_lens) * num_nodes
    assert all(each.is_contiguous() for each in results)
    expected = torch.zeros_like(predict)
    nodes_of, tokens_of = walked(verify_input, own)
    for request, (nodes, tokens) in enumerate(zip(nodes_of, tokens_of)):
        rows = [request * num_nodes + node for node in nodes]
        assert accept_index[request].tolist() == rows + [-1] * (width - len(rows))
        expected[rows] = torch.tensor(tokens, dtype=torch.int32)
    assert torch.equal(predict, expected)
    assert emitted(*results) == tokens_of
    return [len(tokens) for tokens in tokens_of]


@pytest.mark.parametrize("topk", [4, -1], ids=["EAGLE", "n-gram"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_trees_are_walked_along_sglangs_links(method, topk):
    logits, token_ids, parents = drafted_trees()
    verify_input = tree(token_ids, parents, topk=topk)
    hook = EagleSample(method, engine())
    results = hook(never, verify_input, batch_of(torch.zeros(40), top_p=0.5), logits_output(logits))
    own = logits.argmax(dim=-1)
    lengths = assert_walked(results, verify_input, lambda request, node, _: int(own[request, node]))
    assert {1, 2, 3} <= set(lengths)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}], ids=["whole rows", "truncated"])
@pytest.mark.parametrize("method", METHODS)
def test_trees_emit_what_plain_seeded_sampling_says(method, truncation):
    logits, token_ids, parents = drafted_trees()
    verify_input, temperature = tree(token_ids, parents), torch.linspace(0, 2, 40)  # the first request is greedy
    seeds, lengths = torch.arange(40) * 7919, torch.arange(40) + 5
    batch = batch_of(temperature, seeds=seeds, lengths=lengths, **truncation)
    results = EagleSample(method, engine())(never, verify_input, batch, logits_output(logits))

    def own(request, node, depth):
        of = slice(request, request + 1)
        positions = lengths[of] + 1 + depth
        return int(sample(logits[of, node], temperature[of], seeds[of], positions, **truncation))

    assert len(set(assert_walked(results, verify_input, own))) > 1


@pytest.mark.parametrize(("nodes", "max_depth"), [(1, 0), (4, 6), (9, 1)], ids=["no drafts", "few nodes", "cut"])
def test_results_are_as_wide_as_sglangs_depth(nodes, max_depth):
    logits, token_ids, parents = drafted_trees(nodes=nodes)
    own = logits.argmax(dim=-1)
    parents[0], token_ids[0, 1:] = torch.arange(nodes) - 1, own[0, :-1]  # a chain, all of which is accepted
    verify_input = tree(token_ids, parents, max_depth)
    results = EagleSample("block", engine())(never, verify_input, batch_of(torch.zeros(40)), logits_output(logits))
    lengths = assert_walked(results, verify_input, lambda request, node, _: int(own[request, node]))
    assert lengths[0] == max(lengths) == min(nodes, max_depth + 1)


def distribution_of_walks(probs, parents, token_ids, max_depth=TREE_DEPTH):
    """Return the probability of each output of the walk through a tree, given p after each node."""
    steps = Counter()

    def visit(node, emitted, reached):
        for token, p in enumerate(probs[node].tolist()):
            after = [i for i, before in enumerate(parents) if i > 0 and before == node and token_ids[i] == token]
            if after and len(emitted) < max_depth:
                visit(after[0], (*emitted, token), reached * p)
            else:
                steps[(*emitted, token)] += reached * p

    visit(0, (), 1.0)
    return steps


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3, "top_p": 0.9}], ids=["whole rows", "truncated"])
@pytest.mark.parametrize("method", METHODS)
def test_steps_of_trees_are_distributed_as_the_targets_own(method, truncation):
    """A chi-square test for each of two trees: a false alarm once in 10^6; an error of total variation .03 is found."""
    requests, trees = 40_000, (TREE, OTHER_TREE)
    target = torch.randn(2, 7, VOCAB, generator=torch.Generator().manual_seed(18))
    parents, token_ids = (torch.tensor(each) for each in zip(*trees))
    verify_input = repeated(tree(token_ids, parents), requests // 2)
    batch = batch_of(torch.full((requests,), 0.7).to(DEVICE), seeds=torch.arange(requests).to(DEVICE), **truncation)
    output = logits_output(target.repeat(requests // 2, 1, 1).to(DEVICE))
    steps = emitted(*EagleSample(method, engine())(never, verify_input, batch, output))
    for i, of_tree in enumerate(trees):
        exact = distribution_of_walks(kept((target[i].double() / 0.7).softmax(dim=1), **truncation), *of_tree)
        seen = Counter(map(tuple, steps[i::2]))
        assert seen.keys() <= exact.keys()
        assert max(map(len, seen)) == TREE_DEPTH + 1
        counts, probs = (np.array([each[kind] for kind in exact]) for each in (seen, exact))
        distributions.assert_distribution(counts, probs)


def tree_arguments(batch):
    """Return the arguments of the tree verification."""
    logits, token_ids, parents = drafted_trees()
    hook = EagleSample("probabilistic", engine())
    verifier = hook.tree_verifier
    hook.tree_verifier = Mock(tree=Mock(side_effect=verifier.tree))
    output = logits_output(logits)
    hook(never, tree(token_ids, parents), batch, output)
    arguments = hook.tree_verifier.tree.call_args.kwargs
    assert arguments["target_logits"].data_ptr() == output.next_token_logits.data_ptr()  # not copied
    assert torch.equal(arguments["token_ids"], token_ids)
    assert torch.equal(arguments["parents"], parents)
    return arguments


def test_trees_are_given_truncation_as_tensors_and_no_probabilities():
    names, mixed = {"top_k", "top_p", "min_p"}, torch.tensor([0.0, 0.8]).repeat(20)
    got = tree_arguments(batch_of(mixed))
    assert not names & set(got)
    assert got["temperature"].tolist() == mixed.tolist()
    assert got["positions"].tolist() == [8] * 40
    got = tree_arguments(batch := batch_of(mixed, top_p=0.9))
    assert all(got[each] is getattr(batch.sampling_info, f"{each}s") for each in names)


def test_trees_are_penalized_masked_and_sent_to_ranks_as_chains_are():
    logits, token_ids, parents = drafted_trees()
    verify_input, mask, answers = tree(token_ids, parents), Mock(), engine(world_size=2)
    output = logits_output(logits.clone())
    batch = batch_of(torch.full((40,), 0.8), seeds=torch.arange(40))
    batch.sampling_info.logit_bias = bias = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    biased = logits + bias[:, None]
    biased[:, :, 10:] = -torch.inf
    mask.apply.side_effect = lambda rows: rows[:, 10:].fill_(-torch.inf)
    results = EagleSample("block", answers)(never, verify_input, batch, output, mask)
    assert torch.equal(output.next_token_logits, biased.flatten(0, 1))
    answers.sanitize_nan_logits.assert_called_once_with(output.next_token_logits)
    sent = answers.ranks().broadcast.call_args_list
    assert [call.args[0] is result for call, result in zip(sent, results)] == [True] * 3
    batch.sampling_info.logit_bias = None
    plain = EagleSample("block", engine())(never, verify_input, batch, logits_output(biased))
    assert all(torch.equal(*each) for each in zip(results, plain, strict=True))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
def test_all_kernels_of_trees_are_compiled_at_the_first_step_which_is_greedy(monkeypatch, caplog):
    from specdecode.kernels.call import plan_of

    caplog.set_level("INFO", logger="specdecode")
    monkeypatch.setattr(backends, "choose", lambda *_: backends.kernels())
    hook = EagleSample("probabilistic", engine())

    def step(requests, **options):
        logits, token_ids, parents = drafted_trees(requests, nodes=3)
        batch = batch_of(torch.full((requests,), options.pop("temperature")).to(DEVICE), **options)
        hook(never, repeated(tree(token_ids, parents, max_depth=1), 1), batch, logits_output(logits.to(DEVICE)))

    plan_of.cache_clear()
    step(1, temperature=0.0)
    made = plan_of.cache_info().misses
    assert made > 0
    for most in (0, 10**9):  # in rounds, and all rows at once
        limits = dict.fromkeys(("whole", "narrow", "wide"), most)
        monkeypatch.setattr("specdecode.kernels.tree.LOGITS_A_ROUND", limits)
        for requests in (1, 13):
            step(requests, temperature=0.8)
            step(requests, temperature=0.8, top_p=0.9)
    assert plan_of.cache_info().misses == made
    assert [record.getMessage() for record in caplog.records] == ["specdecode: 'strict' verifies draft trees"]


# ---- Steps left to SGLang --------------------------------------------------------------------------------------------

REASONS = {
    "a tree of Uno": {"uno_target_max_top_k": 8},
    "watermarks": {"has_watermark_candidates": True, "watermark_state": object()},
    "speculative_accept_threshold_single": {"threshold": 0.9},
    "speculative_accept_threshold_single or _acc": {"threshold_acc": 0.9},
    "SGLANG_SIMULATE_ACC_LEN": {"simulated": True},
    "arguments that this version of specdecode does not know (typical_eps)": {"typical_eps": 0.1},
}
OPTIONS = "uno_target_max_top_k", "watermark_state", "typical_eps"


@pytest.mark.parametrize("drafts_are", ["a chain", "a tree"])
@pytest.mark.parametrize("reason", REASONS)
def test_steps_that_need_more_go_sglangs_own_way_and_are_counted(reason, drafts_are, caplog):
    logits, drafts = drafted()
    change = dict(REASONS[reason])
    options = {name: change.pop(name) for name in OPTIONS if name in change}
    answers = {name: change.pop(name) for name in ("threshold", "threshold_acc", "simulated") if name in change}
    hook = EagleSample("block", engine(**answers))
    batch, output, mask = batch_of(torch.ones(40)), logits_output(logits), Mock()
    verify_input = chain(drafts)
    if drafts_are == "a tree":
        verify_input = tree(verify_input.draft_token.view(40, 4), torch.tensor([-1, 0, 0, 1]).expand(40, 4))
    for name, value in change.items():
        setattr(verify_input if hasattr(verify_input, name) else batch.sampling_info, name, value)
    original, before = Mock(), logits.clone()
    for _ in range(3):
        result = hook(original, verify_input, batch, output, mask, **options, watermark_full_mask=False)
        assert result is original.return_value
    assert original.call_args.args == (verify_input, batch, output, mask, options.get("uno_target_max_top_k"))
    passed = {"watermark_state": None} | options | {"watermark_full_mask": False}
    passed.pop("uno_target_max_top_k", None)
    assert original.call_args.kwargs == passed
    assert torch.equal(logits, before)
    assert not mask.apply.called  # SGLang's function applies it
    ((counted, steps),) = hook.fallbacks.items()
    assert counted.startswith(reason)
    assert steps == 3
    assert len(caplog.records) == 1
    assert reason in caplog.text


@pytest.mark.parametrize("off", [None, False, 0])
def test_an_unknown_argument_that_is_off_changes_nothing(off):
    logits, drafts = drafted()
    hook = EagleSample("strict", engine())
    hook(never, chain(drafts), batch_of(torch.ones(40)), logits_output(logits), typical_eps=off)
    assert not hook.fallbacks


def test_idle_batches_go_to_sglang_and_are_not_counted():
    hook, original = EagleSample("strict", engine()), Mock()
    idle = Namespace(forward_mode=Namespace(is_idle=lambda: True))
    assert hook(original, Namespace(), idle, Namespace()) is original.return_value
    assert not hook.fallbacks


# ---- Switching it on -------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    """Replace SGLang's registry of hooks by a module."""
    name = "sglang.srt.plugins.hook_registry"
    module = Namespace(HookRegistry=Mock(), HookType=Namespace(AROUND="around"))
    for parent in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, parent, Namespace(__path__=[]))
    monkeypatch.setitem(sys.modules, name, module)
    return module.HookRegistry


def test_nothing_is_registered_without_the_environment_variable(registry, monkeypatch):
    monkeypatch.delenv(integrations.SGLANG_SWITCH, raising=False)
    integrations.register_sglang()
    assert not registry.method_calls


def test_the_environment_variable_registers_a_hook_around_sglangs_function(registry, monkeypatch):
    monkeypatch.setenv(integrations.SGLANG_SWITCH, "block")
    integrations.register_sglang()
    ((target, hook, kind),) = [call.args for call in registry.register.call_args_list]
    assert (target, kind) == (sglang.TARGET, "around")
    assert hook.verifier.method == "block"


def test_another_value_ends_the_process(registry, monkeypatch):
    monkeypatch.setenv(integrations.SGLANG_SWITCH, "greedy")
    with pytest.raises(
        SystemExit, match=r"SPECDECODE_SGLANG: expected one of 'probabilistic', 'block', 'strict'.*'greedy'"
    ):
        integrations.register_sglang()
    assert not registry.method_calls


# ---- Against the engines' own functions ------------------------------------------------------------------------------

REQUESTS = 200_000 if ON_GPU else 400
VOCAB, DRAFTS = 4, 2
others_may_warn = pytest.mark.filterwarnings("default")
ON_GPU_ONLY = "the engine's kernels for this run on a GPU only"


def links(batch, num_rows):
    """Return a chain as a tree: the row of each token, the next token, and no siblings."""
    rows = torch.arange(batch * num_rows, device=DEVICE).view(batch, num_rows)
    follows = torch.tensor([*range(1, num_rows), -1], device=DEVICE).expand_as(rows).contiguous()
    return {
        "retrieve_index": rows,
        "retrieve_next_token": follows,
        "retrieve_next_sibling": torch.full_like(follows, -1),
    }


@others_may_warn
@pytest.mark.skipif(not ON_GPU, reason=ON_GPU_ONLY)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_requests_emit_what_sglang_emits(method):
    name = "sglang.kernels.ops.speculative.spec_tree"
    kernels = pytest.importorskip(name, reason="SGLang is not installed", exc_type=ImportError)
    logits, drafts = drafted()
    verify_input, batch = chain(drafts), batch_of(torch.zeros(40, device=DEVICE))
    verify_input.draft_token = verify_input.draft_token.to(DEVICE)
    ours = EagleSample(method, engine())(never, verify_input, batch, logits_output(logits.to(DEVICE)))
    predict, accept_index, num_accepted = kernels.verify_tree_greedy_func(
        predicts=torch.zeros(160, dtype=torch.int32, device=DEVICE),
        accept_index=torch.full((40, 4), -1, dtype=torch.int32, device=DEVICE),
        accept_token_num=torch.empty(40, dtype=torch.int32, device=DEVICE),
        candidates=verify_input.draft_token.view(40, 4),
        target_predict=logits.argmax(dim=-1).to(DEVICE),
        topk=1,
        **links(40, 4),
    )
    assert torch.equal(ours[1], num_accepted + 1)
    assert torch.equal(ours[2], accept_index)
    assert emitted(*ours) == emitted(predict, num_accepted + 1, accept_index)


def drawn():
    """Return target logits, draft probabilities at temperature 0.7, and drafts drawn from them, different by request."""
    generator = torch.Generator().manual_seed(4)
    target = torch.randn(DRAFTS + 1, VOCAB, generator=generator)
    draft = target[:-1] + torch.randn(DRAFTS, VOCAB, generator=generator)
    draft_probs = (draft / 0.7).softmax(dim=1)
    drafts = torch.multinomial(draft_probs, REQUESTS, replacement=True, generator=generator).T
    return target, draft_probs, drafts.to(DEVICE)


def for_all(rows):
    return rows.to(DEVICE).expand(REQUESTS, *rows.shape).contiguous()


def kept(probs, top_k=VOCAB, top_p=1.0):
    """Return the probabilities of truncated rows: top-k, then top-p."""
    weights, order = probs.sort(dim=1, descending=True)
    weights[:, top_k:] = 0
    weights /= weights.sum(dim=1, keepdim=True)
    weights[weights.cumsum(dim=1) - weights >= top_p] = 0
    return torch.zeros_like(probs).scatter(1, order, weights / weights.sum(dim=1, keepdim=True))


def distribution_of_steps(rule, target, draft):
    """Return the probability of each output of a step, the shortest first; rows are p and q.

    Drafts x are emitted with a probability A(x), given by the rule. One more token y follows them, as an accepted draft
    or not, with probability A(x) p(y). So y is not an accepted draft with probability A(x) p(y) - A(xy).
    """
    accepted = drafted = np.ones(1)  # A and the probability that x is drafted
    steps = []
    for p, q in zip(target.numpy(), [*draft.numpy(), np.zeros(VOCAB)]):
        both, drafted = np.outer(accepted, p), np.outer(drafted, q).ravel()
        accepted = {
            "one-hot": both * q,
            "probabilistic": np.outer(accepted, np.minimum(p, q)),
            "block": np.minimum(both, drafted.reshape(both.shape)),
        }[rule].ravel()
        steps.append(both.ravel() - accepted)
    return np.concatenate(steps)


def counts_of(steps):
    """Return the count of each possible output, in the order of `distribution_of_steps`."""
    seen = Counter(map(tuple, steps))
    lengths = range(1, DRAFTS + 2)
    return np.array([seen[kind] for length in lengths for kind in product(range(VOCAB), repeat=length)])


def assert_distributed(ours, theirs, exact):
    """Compare both with the exact distribution, and with each other. Each of the three raises a false alarm once in 10^6."""
    counts = np.array([counts_of(ours), counts_of(theirs)])
    assert counts.sum(axis=1).tolist() == [REQUESTS] * 2
    for each in counts:
        distributions.assert_distribution(each, exact)
    often = exact * REQUESTS >= 5
    assert chi2_contingency(counts[:, often]).pvalue > distributions.FALSE_ALARM


@others_may_warn
@pytest.mark.parametrize("truncation", [{}, {"top_k": 3, "top_p": 0.9}], ids=["plain", "truncated"])
@pytest.mark.parametrize("rule", ["one-hot", "probabilistic", "block"])
def test_sampled_requests_are_distributed_as_sglangs(monkeypatch, rule, truncation):
    name = "sglang.srt.speculative.eagle_utils"
    theirs = pytest.importorskip(name, reason="SGLang is not installed", exc_type=ImportError)
    if not ON_GPU and (rule == "one-hot" or truncation):
        pytest.skip(ON_GPU_ONLY)
    target, draft_probs, drafts = drawn()
    verify_input = chain(drafts.cpu(), None if rule == "one-hot" else for_all(draft_probs))
    verify_input.draft_token = verify_input.draft_token.to(DEVICE)
    vars(verify_input).update(links(REQUESTS, DRAFTS + 1))
    batch = batch_of(
        torch.full((REQUESTS,), 0.7, device=DEVICE), seeds=torch.arange(REQUESTS, device=DEVICE), **truncation
    )
    batch.device = torch.device(DEVICE)
    output, answers = logits_output(for_all(target)), engine(rejection_sampling=rule != "one-hot")
    answers.settings().speculative_use_block_verification = rule == "block"
    monkeypatch.setattr(theirs, "get_spec", answers.settings)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: Namespace(tp_group=Namespace(world_size=1)))
    monkeypatch.setattr("sglang.srt.layers.dp_attention.is_dp_attention_enabled", lambda: False)

    hook = EagleSample("probabilistic" if rule == "one-hot" else rule, answers)
    ours = hook(never, verify_input, batch, output)
    batch.sampling_info.sampling_seed = None
    torch.manual_seed(7)
    results = theirs.eagle_sample(verify_input, batch, output)
    assert [(each.shape, each.dtype) for each in results] == [(each.shape, each.dtype) for each in ours]
    probs = kept((target.double() / 0.7).softmax(dim=1), **truncation)
    exact = distribution_of_steps(rule, probs, draft_probs.double())
    assert_distributed(emitted(*ours), emitted(*results), exact)


@others_may_warn
@pytest.mark.skipif(not ON_GPU, reason=ON_GPU_ONLY)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 3, "top_p": 0.9}], ids=["whole rows", "truncated"])
def test_trees_are_verified_as_sglangs_own_function_does(monkeypatch, temperature, truncation):
    name = "sglang.srt.speculative.eagle_utils"
    theirs = pytest.importorskip(name, reason="SGLang is not installed", exc_type=ImportError)
    requests = 40_000 if temperature > 0 else 40
    logits, token_ids, parents = drafted_trees()
    if temperature > 0:
        parents, token_ids = (torch.tensor([each]) for each in TREE)
        logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(9)).repeat(requests, 1, 1)
    verify_input, answers = repeated(tree(token_ids, parents), requests // len(parents)), engine()
    nodes = verify_input.draft_token_num
    verify_input.retrieve_index = torch.arange(requests * nodes, device=DEVICE).view(requests, nodes)
    batch = batch_of(torch.full((requests,), temperature, device=DEVICE), **truncation)
    batch.device, batch.sampling_info.sampling_seed = torch.device(DEVICE), torch.arange(requests, device=DEVICE)
    monkeypatch.setattr(theirs, "get_spec", answers.settings)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: Namespace(tp_group=Namespace(world_size=1)))
    monkeypatch.setattr("sglang.srt.layers.dp_attention.is_dp_attention_enabled", lambda: False)
    output = logits_output(logits.to(DEVICE))
    ours = EagleSample("probabilistic", answers)(never, verify_input, batch, output)
    batch.sampling_info.sampling_seed = None
    torch.manual_seed(7)
    results = theirs.eagle_sample(verify_input, batch, output)
    assert [(each.shape, each.dtype) for each in results] == [(each.shape, each.dtype) for each in ours]
    if temperature == 0:
        assert all(torch.equal(*each) for each in zip(ours, results))
        return
    exact = distribution_of_walks(kept((logits[0].double() / temperature).softmax(dim=1), **truncation), *TREE)
    seen = [Counter(map(tuple, emitted(*each))) for each in (ours, results)]
    counts = np.array([[each[kind] for kind in exact] for each in seen])
    assert counts.sum(axis=1).tolist() == [requests] * 2
    for each in counts:
        distributions.assert_distribution(each, np.array(list(exact.values())))


@others_may_warn
@pytest.mark.skipif(not ON_GPU, reason=ON_GPU_ONLY)
def test_sampled_requests_are_distributed_as_flashinfers():
    reason = "FlashInfer is not installed"
    theirs = pytest.importorskip("flashinfer.sampling", reason=reason, exc_type=ImportError)
    target, draft_probs, drafts = drawn()
    probs = (target / 0.7).softmax(dim=1)
    token_ids, _, num_accepted = theirs.chain_speculative_sampling(
        for_all(draft_probs), drafts.to(torch.int32).contiguous(), for_all(probs), seed=7, offset=0
    )
    rows, seeds = (for_all(target), drafts, for_all(0.7 * draft_probs.log())), torch.arange(REQUESTS, device=DEVICE)
    ours = RejectionSampler("probabilistic")(*rows, temperature=0.7, seeds=seeds)
    steps = [
        [row[: count + 1] for row, count in zip(ids.tolist(), counts.tolist())]
        for ids, counts in ((ours.token_ids, ours.num_accepted), (token_ids, num_accepted))
    ]
    exact = distribution_of_steps("probabilistic", (target.double() / 0.7).softmax(dim=1), draft_probs.double())
    assert_distributed(*steps, exact)
