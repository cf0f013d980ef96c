"""`sampler.tree` returns the result of the reference's walk, on both backends, with every option of a call."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reference import oracle
from reference.sampling import Sampling, processed_logprobs
from specdecode import Adjustments, RejectionSampler, backends, sample
from specdecode.arguments import check_tree
from tests.conftest import HAS_TRITON, ON_GPU, combine
from tests.support.adjusted import adjustments_for, of_request
from tests.support.differential import FLOAT32_BAND, Case, band_of
from tests.support.distributions import assert_distribution
from tests.support.packing import in_slots

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter

DEVICE = "cuda" if ON_GPU else "cpu"
BACKENDS = ["eager", *["triton, by rounds", "triton, all at once"] * HAS_TRITON]
TRUNCATIONS: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.2}]
REQUESTS, NODES, DEPTH = 6, 9, 3


class Trees(NamedTuple):
    target_logits: Tensor
    token_ids: Tensor
    parents: Tensor
    temperature: Tensor
    seeds: Tensor
    positions: Tensor


def trees(vocab: int, dtype: torch.dtype, seed: int, requests: int = REQUESTS, nodes: int = NODES) -> Trees:
    """Return trees in any order, deeper than `DEPTH`, with likely drafts, equal siblings, padding, cycles, invalid ids."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    target = 6 * torch.randn(requests, nodes, vocab, generator=generator)
    likely = target.topk(min(4, vocab), dim=-1).indices
    token_ids, parents = draw(0, vocab, requests, nodes), draw(-1, nodes + 1, requests, nodes)
    parents[:, 1:5] = torch.tensor([0, 0, 1, 1])  # some depth in every tree
    for request in range(requests):
        for node in range(1, nodes):
            before = int(parents[request, node])
            if 0 <= before < nodes:
                token_ids[request, node] = likely[request, before, int(draw(0, likely.shape[-1], 1))]
        token_ids[request, int(draw(1, nodes, 1))] = [-1, vocab, 2**31][request % 3]
        order = torch.cat([torch.zeros(1, dtype=torch.int64), 1 + torch.randperm(nodes - 1, generator=generator)])
        new = torch.full((nodes + 2,), -1)
        new[order] = torch.arange(nodes)
        parents[request] = torch.where(parents[request] >= nodes, nodes, new[parents[request]])[order]
        token_ids[request], target[request] = token_ids[request, order], target[request, order]
    temperature = 0.3 + 1.2 * torch.rand(requests, generator=generator)
    temperature[::3] = 0
    return Trees(target.to(dtype), token_ids, parents, temperature, draw(0, 2**40, requests), draw(0, 99, requests))


def adjustments_of(given: Trees, kind: str) -> Adjustments | None:
    if kind == "none":
        return None
    drafts = given.token_ids[:, 1:]
    rows = Case(
        given.target_logits, drafts, given.target_logits[:, 1:], given.temperature, given.seeds, given.positions
    )
    return adjustments_for(rows, kind)


def outcomes(given: Trees, adjustments: Adjustments | None, truncation: dict[str, Any]) -> list[oracle.TreeOutcome]:
    vocab = given.target_logits.shape[-1]
    return [
        oracle.verify_tree(
            given.target_logits[i].float().numpy(),
            given.token_ids[i].tolist(),
            given.parents[i].tolist(),
            max_depth=DEPTH,
            temperature=float(given.temperature[i]),
            seed=int(given.seeds[i]),
            position=int(given.positions[i]),
            adjustments=None if adjustments is None else of_request(adjustments, i, vocab),
            **truncation,
        )
        for i in range(len(given.token_ids))
    ]


def sampler_of(backend: str, monkeypatch: pytest.MonkeyPatch) -> RejectionSampler:
    name, _, way = backend.partition(", ")
    if way:
        most = dict.fromkeys(("whole", "narrow", "wide"), 0 if way == "by rounds" else 10**9)
        monkeypatch.setattr("specdecode.kernels.tree.LOGITS_A_ROUND", most)
    return RejectionSampler("strict", backend=name)


def call(given: Trees, adjustments: Adjustments | None, **options: Any) -> dict[str, Any]:
    arguments = given._asdict() | {"max_depth": DEPTH, "adjustments": adjustments} | options
    return {
        name: value.to(DEVICE)
        if isinstance(value, Tensor)
        else Adjustments(*[each.to(DEVICE) if isinstance(each, Tensor) else each for each in value])
        if isinstance(value, Adjustments)
        else value
        for name, value in arguments.items()
    }


def packed(given: Trees, adjustments: Adjustments | None, **options: Any) -> dict[str, Any]:
    """Return the same trees with packed rows, between unused rows, and all other tensors in shuffled slots."""
    requests, nodes = given.token_ids.shape
    row_starts = 2 + nodes * torch.arange(requests + 1)
    slots, num_slots = torch.arange(requests).flip(0) + 1, requests + 2
    between = torch.full((2, given.target_logits.shape[-1]), float("nan"), dtype=given.target_logits.dtype)
    rows = {"target_logits": torch.cat([between, given.target_logits.flatten(0, 1), between]), "row_starts": row_starts}
    if adjustments is not None:
        mask = adjustments.allowed_mask
        if mask is not None:
            mask = torch.nn.functional.pad(mask.flatten(0, 1), (0, 0, 2, 2))
        adjustments = Adjustments(*[in_slots(each, slots, num_slots) for each in adjustments[:-1]], mask)
    by_slot = {"temperature": given.temperature, "seeds": given.seeds} | options
    by_slot = {name: in_slots(value, slots, num_slots) for name, value in by_slot.items()}
    return call(given, adjustments, **rows, slots=slots, **by_slot)


def assert_outcomes(output: Any, expected: list[oracle.TreeOutcome], band: float) -> None:
    excused = 0
    for i, outcome in enumerate(expected):
        ids = outcome.token_ids + [-1] * (DEPTH + 1 - len(outcome.token_ids))
        nodes = outcome.nodes + [-1] * (DEPTH - len(outcome.nodes))
        got = output.token_ids[i].tolist(), output.nodes[i].tolist()
        assert output.num_draft_tokens[i] == outcome.num_draft_tokens
        if got != (ids, nodes):
            assert outcome.margin <= band, f"request {i}: {got} != {(ids, nodes)}, by {outcome.margin:.2e} nats"
            excused += 1
            continue
        assert (output.num_accepted[i], output.num_tokens[i]) == (len(outcome.nodes), len(outcome.token_ids))
        assert output.invalid[i] == outcome.invalid
    assert excused <= 1


CASES = combine(
    BACKENDS,
    [torch.float32, torch.bfloat16, torch.float16],
    [7, 2500] if not ON_GPU else [7, 2500, 33_000],
    TRUNCATIONS,
    ["none", "all", "penalties", "mask"],
    ["padded", "packed"],
)


@pytest.mark.parametrize(("backend", "dtype", "vocab", "truncation", "kind", "layout"), CASES, ids=str)
def test_trees_are_verified_as_by_the_reference(monkeypatch, backend, dtype, vocab, truncation, kind, layout):
    accepted = 0
    for seed in range(1 + ON_GPU):
        given = trees(vocab, dtype, seed)
        adjustments = adjustments_of(given, kind)
        expected = outcomes(given, adjustments, truncation)
        arguments = (call if layout == "padded" else packed)(given, adjustments)
        output = sampler_of(backend, monkeypatch).tree(**arguments, **truncation)
        assert_outcomes(output, expected, band_of(dtype, backend.partition(",")[0]))
        accepted += sum(len(outcome.nodes) for outcome in expected)
    assert accepted > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_text_is_that_of_plain_sampling(monkeypatch, backend):
    requests = 40 if ON_GPU or backend == "eager" else 15
    given = trees(50, torch.float32, seed=3, requests=requests)
    output = sampler_of(backend, monkeypatch).tree(**call(given, None))
    row, alive = torch.zeros(requests, dtype=torch.int64), torch.ones(requests, dtype=torch.bool)
    for depth in range(DEPTH + 1):
        rows = given.target_logits[torch.arange(requests), row].to(DEVICE)
        options = given.temperature.to(DEVICE), given.seeds.to(DEVICE), (given.positions + depth).to(DEVICE)
        plain = sample(rows, *options).cpu()
        assert torch.equal(output.token_ids[:, depth].cpu(), torch.where(alive, plain, -1))
        if depth < DEPTH:
            row = output.nodes[:, depth].cpu().long().clamp(min=0)
            alive &= output.nodes[:, depth].cpu() >= 0
    assert output.num_accepted.sum() > requests // 2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_logprobs_and_lists_are_those_of_the_rows_on_the_path(monkeypatch, backend, layout):
    given, truncation = trees(2500, torch.float32, seed=5), {"top_k": 40, "top_p": 0.9}
    options = {"logprobs": "processed", "top_logprobs": 3, "kept_sets": True}
    arguments = (call if layout == "padded" else packed)(given, None)
    sampler = sampler_of(backend, monkeypatch)
    output = sampler.tree(**arguments, **truncation, **options)
    plain = sampler.tree(**arguments, **truncation)
    assert torch.equal(output.token_ids, plain.token_ids)
    assert plain.logprobs is None
    for i, nodes in enumerate(output.nodes.tolist()):
        accepted = [node for node in nodes if node >= 0]
        rows = given.target_logits[i, [0, *accepted]].double().numpy()
        ids = output.token_ids[i, : len(accepted) + 1].tolist()
        sampling = Sampling(float(given.temperature[i]), **truncation)
        expected = processed_logprobs(rows, ids, sampling)
        np.testing.assert_allclose(output.logprobs[i, : len(ids)].cpu(), expected, atol=2e-5)
        assert output.logprobs[i, len(ids) :].isnan().all()
        assert (output.top_token_ids[i, len(ids) :] == -1).all()
        assert (output.num_kept[i, : len(ids)] > 0).all()
        assert (output.num_kept[i, len(ids) :] == 0).all()
        assert (output.kept_cutoff[i, len(ids) :] == -1).all()
        if given.temperature[i] > 0:
            np.testing.assert_array_equal(output.top_token_ids[i, 0, 0].cpu(), rows[0].argmax())


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_without_rows_and_trees_of_one_node(monkeypatch, backend):
    rows = torch.zeros(3, 8, device=DEVICE)
    rows[:, 3] = 30.0
    arguments = {"row_starts": torch.tensor([0, 1, 1, 3], device=DEVICE), "max_depth": 2, "seeds": 0}
    token_ids = torch.tensor([[0, 3], [0, 3], [0, 3]], device=DEVICE)
    output = sampler_of(backend, monkeypatch).tree(rows, token_ids, torch.tensor([-1, 0], device=DEVICE), **arguments)
    assert output.token_ids.tolist() == [[3, -1, -1], [0, -1, -1], [3, 3, -1]]
    assert output.nodes.tolist() == [[-1, -1], [-1, -1], [1, -1]]
    assert output.num_draft_tokens.tolist() == [0, 0, 1]
    assert output.invalid.tolist() == [False, True, False]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_off_the_path_change_nothing_and_a_row_without_a_finite_logit_is_marked(monkeypatch, backend):
    given = trees(40, torch.float32, seed=6)
    sampler = sampler_of(backend, monkeypatch)
    expected = sampler.tree(**call(given, None))
    rows = given.target_logits.clone()
    for i, nodes in enumerate(expected.nodes.tolist()):
        off = sorted(set(range(NODES)) - {0, *nodes})
        rows[i, off] = float("nan")
    output = sampler.tree(**call(given._replace(target_logits=rows), None))
    for got, other in zip(output[:5], expected[:5]):
        assert torch.equal(got, other)
    rows[:, 0] = float("nan")
    output = sampler.tree(**call(given._replace(target_logits=rows), None))
    assert output.invalid.all()
    assert (output.token_ids[:, 0] == 0).all()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01}], ids=["whole rows", "truncated"])
def test_a_warm_up_with_one_request_makes_the_plans_of_all_sizes(monkeypatch, truncation):
    from specdecode.kernels.call import plan_of

    few, many = (trees(40, torch.float32, seed=7, requests=requests) for requests in (1, 13))

    def arguments(given):
        limits = {name: torch.full((len(given.seeds),), value, device=DEVICE) for name, value in truncation.items()}
        return call(given, None) | limits

    plan_of.cache_clear()
    RejectionSampler("strict", backend="triton").warmup_tree(**arguments(few))
    made = plan_of.cache_info().misses
    assert made > 0
    for way in ("triton, by rounds", "triton, all at once"):
        for given in (few, many):
            sampler_of(way, monkeypatch).tree(**arguments(given))
    assert plan_of.cache_info().misses == made


BAD = {
    "token_ids: expected shape": {"token_ids": torch.zeros(2, 0, dtype=torch.int64)},
    "token_ids: expected dtype": {"token_ids": torch.zeros(2, 3)},
    "target_logits: expected shape": {"target_logits": torch.zeros(2, 4, 5)},
    "parents: expected shape": {"parents": torch.zeros(2, 4, dtype=torch.int64)},
    "parents: expected dtype": {"parents": torch.zeros(2, 3)},
    "max_depth: expected an int >= 0": {"max_depth": -1},
    "positions: expected shape": {"positions": torch.zeros(3, dtype=torch.int64)},
    "top_p: expected a float": {"top_p": 1.5},
    "draft_logsumexp: trees": {"draft_logsumexp": torch.zeros(2, 2)},
    "vocab_size: trees take no such argument": {"vocab_size": 100},
    "temperature: expected shape": {"temperature": torch.ones(5)},
    "seeds: expected shape": {"seeds": torch.arange(4)},
    "slots: given without row_starts": {"slots": torch.zeros(2, dtype=torch.int64)},
    "row_starts: expected shape": {"row_starts": torch.tensor([0, 3]), "target_logits": torch.zeros(3, 5)},
    "adjustments.allowed_mask: expected shape": {"adjustments": Adjustments(allowed_mask=torch.zeros(2, 1).int())},
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(message):
    arguments = {"target_logits": torch.zeros(2, 3, 5), "token_ids": torch.zeros(2, 3, dtype=torch.int64)}
    arguments |= {"parents": torch.tensor([-1, 0, 0]), "max_depth": 2}
    RejectionSampler("strict").tree(**arguments)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        RejectionSampler("strict").tree(**arguments | BAD[message])


@pytest.mark.parametrize("backend", BACKENDS[:2])  # penalties need rounds
def test_a_chain_is_verified_as_a_chain_its_drafts_counted(monkeypatch, backend):
    requests, vocab = 40 if ON_GPU or backend == "eager" else 20, 5
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(requests, DEPTH + 1, vocab, generator=generator).to(DEVICE)
    rows[..., 0] += 1
    drafts = (torch.rand(requests, DEPTH, generator=generator) < 0.2).long().to(DEVICE)  # most of them equal
    options = {"temperature": torch.rand(requests, generator=generator).round(decimals=1).to(DEVICE), "seeds": 5}
    penalties = Adjustments(repetition_penalty=0.4, frequency_penalty=-1.5, presence_penalty=0.7)
    sampler = sampler_of(backend, monkeypatch)
    chain = sampler(rows, drafts, **options, adjustments=penalties)
    token_ids, parents = torch.nn.functional.pad(drafts, (1, 0)), torch.arange(-1, DEPTH, device=DEVICE)
    tree = sampler.tree(rows, token_ids, parents, max_depth=DEPTH, **options, adjustments=penalties)
    assert torch.equal(tree.token_ids, chain.token_ids)
    assert torch.equal(tree.num_accepted, chain.num_accepted)
    assert (chain.num_accepted >= 2).sum() > requests // 8
    assert not torch.equal(chain.token_ids, sampler(rows, drafts, **options).token_ids)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_sizes_and_layouts(monkeypatch, backend):
    """One node, no request, no depth, many nodes in a chain, int32 ids, strided rows, a number or None for the seeds."""
    sampler = sampler_of(backend, monkeypatch)
    chain = torch.arange(1, 301, device=DEVICE, dtype=torch.int32)  # from the last node down: children in any block
    chain[0], chain[-1] = -1, 0
    rows = torch.zeros(2, 301, 12, device=DEVICE)[:, :300, :7]
    rows[:, :, 3] = 40.0
    ids = torch.full((2, 300), 3, device=DEVICE, dtype=torch.int32)
    depth = 40 if ON_GPU or backend == "eager" else 9
    output = sampler.tree(rows, ids, chain, max_depth=depth, adjustments=Adjustments(presence_penalty=0.5))
    assert output.num_accepted.tolist() == output.num_draft_tokens.tolist() == [depth, depth]
    assert output.nodes[0].tolist() == list(range(299, 299 - depth, -1))
    rows, ids, chain = rows[:, :9], ids[:, :9], torch.arange(-1, 8, device=DEVICE, dtype=torch.int32)
    assert sampler.tree(rows, ids, chain, max_depth=0, seeds=3).token_ids.tolist() == [[3], [3]]
    output = sampler.tree(rows[:, :1], ids[:, :1], chain[:1], max_depth=5)
    assert output.token_ids.tolist() == [[3, -1, -1, -1, -1, -1]] * 2
    assert sampler.tree(rows[:0], ids[:0], chain, max_depth=2).token_ids.shape == (0, 3)
    starts = torch.tensor([0, 9, 18], device=DEVICE, dtype=torch.int32)
    output = sampler.tree(rows.flatten(0, 1), ids, chain, max_depth=2, row_starts=starts, top_k=1)
    assert output.token_ids.tolist() == [[3, 3, 3]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_whose_rows_or_slots_cannot_be_have_none(monkeypatch, backend):
    given = trees(40, torch.float32, seed=8)
    arguments = packed(given, None)
    checked = check_tree(**arguments)  # on a device these values could not be checked
    starts, slots = checked.packing.row_starts.clone(), checked.packing.slots.clone()
    starts[2], slots[4] = -5, 99
    packing = checked.packing._replace(row_starts=starts, slots=slots)
    sampler_of(backend, monkeypatch)
    backend_of = backends.choose("eager" if backend == "eager" else "triton", arguments["target_logits"])
    got, want = (
        backend_of.verify_tree(checked._replace(rows=checked.rows._replace(packing=each)))
        for each in (packing, checked.packing)
    )
    for i in range(REQUESTS):
        if i in (1, 2, 4):  # a start belongs to two requests
            assert got.token_ids[i].tolist() == [0, -1, -1, -1]
            assert (got.num_accepted[i], got.num_draft_tokens[i], bool(got.invalid[i])) == (0, 0, True)
        else:
            assert torch.equal(got.token_ids[i], want.token_ids[i])


def test_probabilities_are_refused_whatever_padding_holds():
    rows = torch.zeros(1, 3, 8)
    rows[:, :2] = torch.rand(1, 2, 8).softmax(-1)
    with pytest.raises(ValueError, match=r"^target_logits: expected raw logits"):
        RejectionSampler("strict", validate="values").tree(
            rows, torch.tensor([[0, 1, -1]]), torch.tensor([-1, 0, -1]), max_depth=1
        )


@pytest.mark.parametrize("method", ["probabilistic", "block"])
def test_methods_that_need_drawn_siblings_say_so(method):
    with pytest.raises(ValueError, match=r"use RejectionSampler\('strict'\)\.tree"):
        RejectionSampler(method).tree(
            torch.zeros(1, 1, 2), torch.zeros(1, 1).long(), torch.zeros(1).long(), max_depth=0
        )


@pytest.mark.parametrize("truncation", [{}, {"top_k": 4, "top_p": 0.9}], ids=["whole rows", "truncated"])
@pytest.mark.parametrize("backend", BACKENDS if ON_GPU else ["eager"])
def test_trees_of_siblings_emit_the_targets_distribution(monkeypatch, backend, truncation):
    """Two tokens, the second drawn plainly where the tree gave one alone; 200,000 requests on a GPU."""
    requests, vocab, random = 200_000 if ON_GPU else 20_000, 6, np.random.default_rng(0)
    target, draft = random.normal(size=(1 + vocab, vocab)), random.normal(size=vocab)  # the row after token v is 1 + v
    sampler, seeds = sampler_of(backend, monkeypatch), torch.arange(requests, device=DEVICE)
    rows = torch.tensor(target, dtype=torch.float32, device=DEVICE)
    drafts = torch.tensor(target[0] + draft, dtype=torch.float32, device=DEVICE).expand(requests, vocab)
    siblings = sampler.draft(drafts, seeds=seeds, width=3, **truncation).token_ids
    token_ids = nn.functional.pad(siblings, (1, 0))
    logits = torch.cat([rows[:1].expand(requests, 1, vocab), rows[1 + siblings.clamp(min=0)]], dim=1)
    parents = torch.tensor([-1, 0, 0, 0], device=DEVICE)
    output = sampler.tree(logits, token_ids, parents, max_depth=1, seeds=seeds, **truncation)
    first, second = output.token_ids.T
    plain = sample(rows[1 + first], seeds=seeds, positions=torch.ones_like(seeds), **truncation)
    second = second.where(second >= 0, plain)
    counts = torch.bincount(first * vocab + second, minlength=vocab * vocab).cpu().numpy()
    p = np.stack(
        [np.exp(processed_logprobs(row[None].repeat(vocab, 0), range(vocab), Sampling(**truncation))) for row in target]
    )
    assert_distribution(counts, (p[0][:, None] * p[1:]).ravel())
    assert output.num_accepted.double().mean() > 0.6


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_captured_call_replays_with_new_trees():
    first, second = (call(trees(2500, torch.bfloat16, seed), None) for seed in (1, 2))
    sampler = RejectionSampler("strict", backend="triton")
    expected = sampler.tree(**second)
    sampler.tree(**first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sampler.tree(**first)
    for name in Trees._fields:
        first[name].copy_(second[name])
    graph.replay()
    for got, other in zip(output[:5], expected[:5]):
        assert torch.equal(got, other)


ROWS = [(7, torch.float32), (3100, torch.bfloat16), *[(9300, torch.float16)] * ON_GPU]


@pytest.mark.parametrize(
    ("backend", "truncation", "rows_of"), combine(["eager", *["triton"] * HAS_TRITON], TRUNCATIONS, ROWS), ids=str
)
def test_siblings_are_those_of_the_reference(backend, truncation, rows_of):
    (vocab, dtype), requests, excused = rows_of, 12, 0
    sampler, generator = RejectionSampler("strict", backend=backend), torch.Generator().manual_seed(vocab)
    rows = (3 * torch.randn(requests, vocab, generator=generator)).to(dtype)
    rows[1], rows[2, 3], rows[3, 2:], rows[4, ::2] = float("nan"), float("inf"), float("-inf"), float("nan")
    temperature = 0.3 + torch.rand(requests, generator=generator)
    temperature[::5] = 0
    seeds, positions = (torch.randint(0, 2**40, (requests,), generator=generator) for _ in range(2))
    arguments = [each.to(DEVICE) for each in (rows, temperature, seeds, positions)]
    plain = sampler.draft(*arguments, **truncation)
    for width in (1, 3, 8) if ON_GPU or backend == "eager" else (4,):
        draft = sampler.draft(*arguments, **truncation, width=width)
        assert draft.token_ids.shape == (requests, width)
        assert torch.equal(draft.token_ids[:, 0], plain.token_ids)
        for got, other in zip(draft[1:], plain[1:]):
            assert got is other is None or torch.equal(got, other)
        for i, got in enumerate(draft.token_ids.tolist()):
            numbers = {"temperature": float(temperature[i]), "seed": int(seeds[i]), "position": int(positions[i])}
            expected = oracle.draft_siblings(rows[i].float().numpy(), width, **numbers, **truncation)
            if got != expected.token_ids:
                assert expected.margin <= FLOAT32_BAND, f"request {i}: {got} != {expected}"
                excused += 1
    assert excused <= 2


def test_wrong_widths_are_named():
    for sampler, width in (
        (RejectionSampler("strict"), 0),
        (RejectionSampler("strict"), 9),
        (RejectionSampler("block"), 2),
    ):
        with pytest.raises(ValueError, match=r"^width: "):
            sampler.draft(torch.zeros(1, 20), width=width)
