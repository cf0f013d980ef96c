"""The sampler inside functions that torch.compile compiles as one graph, without a graph break."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, SamplerOutput, Sampling, sample

METHODS = ["strict", "probabilistic", "block", "synthetic"]
BATCH, DRAFTS, VOCAB = 4, 3, 1100

each_method = pytest.mark.parametrize("method", METHODS)


def make(method: str, place) -> RejectionSampler:
    schedule = AcceptanceSchedule.from_rates([0.9, 0.5, 0.3, 0.1]) if method == "synthetic" else None
    return RejectionSampler(method, backend=place[0], schedule=schedule)


def compiled(function):
    """The function as one graph; "aot_eager" traces all that other backends trace, and needs no C++ compiler."""
    torch._dynamo.reset()  # the code of a call is shared by all tests, and may only be compiled a few times
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def inputs(place, *, draft_logits: bool) -> dict[str, Tensor | None]:
    """Rows and drafts, some of which are accepted, with fewer drafts in one request."""
    generator = torch.Generator().manual_seed(0)
    target = 3 * torch.randn(BATCH, DRAFTS + 1, VOCAB, generator=generator)
    draft = target[:, :DRAFTS] + torch.randn(BATCH, DRAFTS, VOCAB, generator=generator)
    ids = draft.argmax(dim=2)
    ids[1, 1] = -1
    device = place[1]
    return {
        "target_logits": target.to(device),
        "draft_token_ids": ids.to(device),
        "draft_logits": draft.to(device) if draft_logits else None,
    }


def options(place, form: str, call: dict) -> dict:
    """What may be a number or a tensor, and what may be given or not."""
    if form == "numbers":
        return {"temperature": 0.7, "seeds": -(2**40), "logprobs": "raw"}
    temperature = torch.tensor([1.0, 0.0, 0.5, 2.0], device=place[1])
    tensors = {
        "temperature": temperature,
        "seeds": torch.tensor([3, -(2**63), 2**63 - 1, 0], device=place[1]),
        "positions": torch.tensor([0, 7, 2**40, 1], device=place[1]),
        "logprobs": "processed",
    }
    if call["draft_logits"] is not None:
        # Not the logsumexp of these logits: it changes what is accepted, so the test sees whether it arrives.
        tensors["draft_logsumexp"] = torch.full((BATCH, DRAFTS), 5.0, device=place[1])
    return tensors


def assert_same(one: SamplerOutput, other: SamplerOutput) -> None:
    for name in (*SamplerOutput._fields, "num_tokens"):
        got, want = getattr(one, name), getattr(other, name)
        assert got is want or torch.equal(got.nan_to_num(nan=7), want.nan_to_num(nan=7)), name
        assert got is want or got.dtype == want.dtype, name


@each_method
@pytest.mark.parametrize("draft_logits", [True, False], ids=["draft_logits", "deterministic"])
@pytest.mark.parametrize("form", ["numbers", "tensors"])
def test_a_compiled_call_returns_what_a_call_returns(place, method, draft_logits, form):
    sampler, call = make(method, place), inputs(place, draft_logits=draft_logits)
    arguments = options(place, form, call)

    def step(target_logits: Tensor, **rest) -> SamplerOutput:
        return sampler(target_logits * 2, **rest)  # there is something to compile around the call

    expected = step(**call, **arguments)
    assert 0 < int(expected.num_accepted.sum()) < int(expected.num_draft_tokens.sum())
    assert_same(compiled(step)(**call, **arguments), expected)


@pytest.mark.parametrize("method", ["strict", "block"])
@pytest.mark.parametrize("seeds", ["by slot", "drawn"])
def test_a_compiled_packed_call_returns_what_a_call_returns(place, method, seeds):
    sampler, call = make(method, place), inputs(place, draft_logits=True)
    rows = {"target_logits": call["target_logits"].flatten(0, 1)}
    rows["draft_token_ids"] = rows["target_logits"].argmax(dim=1)[:-1]
    rows["row_positions"] = torch.arange(16, device=place[1])
    rows["row_starts"], slots = (
        torch.tensor([0, 4, 5, 5, 8], device=place[1]),
        torch.tensor([2, 2, 0, 1], device=place[1]),
    )
    by_slot = {"draft_logits": call["draft_logits"][:3], "temperature": torch.tensor([1.0, 2.0, 0.5], device=place[1])}
    if seeds == "by slot":
        by_slot["seeds"] = torch.tensor([7, 8, 9], device=place[1])

    def step(**arguments: Tensor) -> SamplerOutput:
        return sampler.packed(**arguments, num_draft_tokens=DRAFTS)

    again = compiled(step)
    torch.manual_seed(0)
    expected = step(**rows, **by_slot, slots=slots)
    torch.manual_seed(0)
    assert_same(again(**rows, **by_slot, slots=slots), expected)
    assert expected.invalid.tolist() == [False, False, True, False]


@each_method
@pytest.mark.parametrize("form", ["numbers", "tensors"])
def test_compiled_drafts_and_samples_are_those_of_a_call(place, method, form):
    sampler, call = make(method, place), inputs(place, draft_logits=True)
    arguments = options(place, form, call)
    arguments.pop("draft_logsumexp", None)
    arguments.pop("logprobs")

    def step(logits: Tensor, **rest) -> tuple:
        return sampler.draft(logits, **rest, offset=2), sample(logits + 1, **rest)

    draft, tokens = compiled(step)(call["target_logits"][:, 0], **arguments)
    expected_draft, expected_tokens = step(call["target_logits"][:, 0], **arguments)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(draft.token_ids, expected_draft.token_ids)
    assert torch.equal(draft.logsumexp, expected_draft.logsumexp)
    assert draft.logsumexp.dtype == torch.float32


ONES, ZEROS = torch.ones(BATCH), torch.zeros(BATCH)


@pytest.mark.parametrize("temperature", [0.7, 0.0, torch.tensor([0.0, 0.5, 1.0, 0.0]), ZEROS], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 1.0},
        {"top_k": 0, "top_p": 1, "min_p": 0.0},
        {"top_k": VOCAB},
        {"top_k": VOCAB - 1},
        {"top_k": 1},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"top_p": ONES},
        {"top_k": ZEROS.long(), "min_p": ZEROS},
        {"top_k": VOCAB, "top_p": torch.tensor([1.0, 0.5, 0.9, 1.0])},
    ],
    ids=lambda options: ", ".join(options) or "whole",
)
def test_compiled_drafts_have_the_cutoffs_of_a_call(place, options, temperature):
    # Where nothing is left out a cutoff is None or -1: 0 would say that token 0 alone is kept.
    sampler, rows = make("block", place), inputs(place, draft_logits=False)["target_logits"][:, 0]
    on_device = {name: value.to(place[1]) if isinstance(value, Tensor) else value for name, value in options.items()}
    on_device["temperature"] = temperature.to(place[1]) if isinstance(temperature, Tensor) else temperature
    draft = partial(sampler.draft, seeds=0, **on_device)
    for got, expected in zip(compiled(draft)(rows), draft(rows), strict=True):
        assert got is expected or torch.equal(got, expected)


def test_the_operator_that_draws_keeps_all_tokens_where_nothing_is_left_out(place):
    rows = inputs(place, draft_logits=False)["target_logits"][:, 0]
    neutral = [None] * 4, [0.7, 0.0, 1.0, 0.0]
    *_, cutoff = torch.ops.specdecode.sample(place[0], 3, 4, rows, *neutral, None, 5, None)
    assert cutoff.tolist() == [-1] * BATCH


@each_method
def test_the_offset_of_a_compiled_draft_may_change(place, method):
    sampler, rows = make(method, place), inputs(place, draft_logits=False)["target_logits"][:, 0]
    step = compiled(lambda offset: sampler.draft(rows, seeds=0, offset=offset).token_ids)
    for offset in range(5):
        assert torch.equal(step(offset), sampler.draft(rows, seeds=0, offset=offset).token_ids)


def test_compiled_calls_without_seeds_have_fresh_ones_each_time(place):
    even = torch.zeros(8, 1, 2048, device=place[1])  # two draws of 8 tokens agree with probability 2,048^-8
    no_drafts = torch.zeros(8, 0, dtype=torch.int64, device=place[1])
    sampler = make("strict", place)

    def step(logits: Tensor) -> tuple[Tensor, ...]:
        rows = logits[:, 0]
        calls = sampler(logits, no_drafts).token_ids[:, 0], sampler(logits, no_drafts).token_ids[:, 0]
        return *calls, sampler.draft(rows).token_ids, sampler.draft(rows).token_ids, sample(rows), sample(rows)

    again = compiled(step)
    torch.manual_seed(1)
    draws = [tokens.tolist() for _ in range(2) for tokens in again(even)]
    assert len(set(map(str, draws))) == 12
    torch.manual_seed(1)
    assert [tokens.tolist() for _ in range(2) for tokens in step(even)] == draws


def test_seeds_and_batches_that_change_do_not_compile_again_each_time(place):
    torch._dynamo.utils.counters.clear()
    sampler, call = make("probabilistic", place), inputs(place, draft_logits=True)
    step = compiled(lambda call, seeds: sampler(**call, seeds=seeds))
    for size in (4, 3, 2):
        part = {name: value[:size] for name, value in call.items()}
        for seeds in (0, 1, 7, 2**40):
            assert_same(step(part, seeds), sampler(**part, seeds=seeds))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4


def test_a_compiled_step_counts_its_acceptance(place):
    call, sampler = inputs(place, draft_logits=True), make("probabilistic", place)
    stats, expected = (AcceptanceStats(DRAFTS, device=place[1]) for _ in range(2))

    def step(stats: AcceptanceStats, seeds: Tensor) -> Tensor:
        output = sampler(**call, seeds=seeds)
        stats.update(output)
        return output.token_ids

    again = compiled(step)
    for first in (0, 50):
        seeds = torch.arange(first, first + BATCH, device=place[1])
        assert torch.equal(again(stats, seeds), step(expected, seeds))
    assert stats.draft_tokens == 2 * 10
    assert str(stats) == str(expected)


def test_errors_of_compiled_calls_name_the_argument(place):
    call, sampler = inputs(place, draft_logits=False), make("probabilistic", place)
    step = compiled(lambda ids, seeds, of=None: sampler(call["target_logits"], ids, seeds=seeds, logprobs=of))
    ids, seeds = call["draft_token_ids"], torch.arange(BATCH, device=place[1])
    step(ids, seeds)
    with pytest.raises(ValueError, match=r"^seeds: expected shape \[4\], got \[3\]"):
        step(ids, seeds[:3])
    with pytest.raises(TypeError, match=r"^draft_token_ids: expected dtype int32, int64, got float32"):
        step(ids.float(), seeds)
    with pytest.raises(ValueError, match=r"^logprobs: expected one of 'processed', 'raw', got 'most'"):
        step(ids, seeds, "most")
    with pytest.raises(RuntimeError, match=r"logits: expected shape \[batch, vocab\]"):
        compiled(sample)(call["target_logits"], 1.0, seeds)
    for name, value in (("top_k", 2.7), ("top_k", True), ("temperature", None), ("top_p", "0.5")):
        expected = rf"^{name}: expected a number or a tensor in code that is compiled, got {type(value).__name__}"
        with pytest.raises(TypeError, match=expected):
            compiled(sampler)(call["target_logits"], ids, seeds=seeds, **{name: value})


WRONG = [
    ("seeds", True, TypeError, r"expected an int, a \[batch\] int64 tensor or None, got bool"),
    ("seeds", 1.5, TypeError, r"expected an int, .*, got float"),
    ("seeds", "x", TypeError, r"expected an int, .*, got str"),
    ("seeds", 2**63, ValueError, "expected an int of 64 bits"),
    ("draft_sampling", (1.0, None, None, None), TypeError, "expected a Sampling, got tuple"),
    ("draft_sampling", Sampling(top_p=2.0), ValueError, "top_p: expected a float"),
    ("num_draft_tokens", None, TypeError, "expected an int >= 0, got None"),
    ("num_draft_tokens", -1, ValueError, "expected an int >= 0, got -1"),
    ("num_draft_tokens", 5000, ValueError, "expected at most 4096, got 5000"),
    ("row_starts", None, TypeError, "expected a torch.Tensor, got NoneType"),
    ("row_starts", [0, 4], TypeError, "expected a torch.Tensor, got list"),
    ("row_starts", torch.zeros(0, dtype=torch.int64), ValueError, r"expected shape \[batch \+ 1\], got \[0\]"),
    ("offset", -3, ValueError, "expected an int >= 0, got -3"),
    ("offset", "x", TypeError, "expected an int >= 0, got 'x'"),
    ("offset", 4096, ValueError, "expected at most 4095, got 4096"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG, ids=str)
def test_wrong_arguments_of_compiled_calls_raise_the_errors_of_a_call(place, name, value, error, message):
    sampler, call = make("block", place), inputs(place, draft_logits=True)
    rows = {"target_logits": call["target_logits"].flatten(0, 1), "draft_token_ids": ZEROS.long().repeat(4)}
    rows |= {"row_starts": torch.arange(0, 17, 4), "num_draft_tokens": DRAFTS, "seeds": 0}
    rows = {name: value.to(place[1]) if isinstance(value, Tensor) else value for name, value in rows.items()}
    calls = {
        "padded": lambda: sampler(**call | {name: value}).token_ids[0, 1],
        "packed": lambda: sampler.packed(**rows | {name: value}).num_accepted,
        "draft": lambda: sampler.draft(call["target_logits"][:, 0], **{name: value}).token_ids[1],
    }
    use = {"num_draft_tokens": ["packed"], "row_starts": ["packed"], "offset": ["draft"], "draft_sampling": ["padded"]}
    for each in use.get(name, calls):
        for step in (calls[each], compiled(calls[each])):
            with pytest.raises(error, match=f"^{name}.*{message}"):
                step()


def test_outputs_of_compiled_calls_need_no_gradients(place):
    call = inputs(place, draft_logits=True)
    call["target_logits"].requires_grad_()
    call["draft_logits"].requires_grad_()
    sampler = make("block", place)
    drafted = partial(sampler.draft, seeds=0)
    step = compiled(lambda call: (*sampler(**call, seeds=0, logprobs="raw"), *drafted(call["draft_logits"][:, 0])[:2]))
    assert not any(value.requires_grad for value in step(call))


@pytest.mark.parametrize("draft_logits", [True, False], ids=["draft_logits", "deterministic"])
def test_operators_keep_the_rules_of_operators(place, draft_logits):
    # The shapes and dtypes that they announce are right, they write to no input, and outputs share no memory with anything.
    call = inputs(place, draft_logits=draft_logits)
    seeds = torch.arange(BATCH, device=place[1])
    logsumexp = call["draft_logits"].logsumexp(dim=2) if draft_logits else None
    numbers = [None] * 4, [0.7, 0.0, 1.0, 0.0]
    arguments = ("block", place[0], [], *call.values(), logsumexp, *numbers, [], [], seeds, 0, None, None, None)
    torch.library.opcheck(torch.ops.specdecode.verify.default, (*arguments, None, None, 0, None, None, False))
    without_values = ("test_schema", "test_faketensor")  # NaN is not equal to itself
    raw = (*arguments, "raw", None, 0, None, None, False)
    torch.library.opcheck(torch.ops.specdecode.verify.default, raw, test_utils=without_values)
    packed = call["target_logits"].flatten(0, 1), seeds.new_zeros(BATCH * (DRAFTS + 1)), *arguments[5:]
    where = None, torch.tensor([0, 3, 3, 7, 8], device=place[1]), DRAFTS, seeds.flip(0), None, True
    torch.library.opcheck(torch.ops.specdecode.verify.default, (*arguments[:3], *packed, *where))
    arguments = (place[0], 3, 4, call["target_logits"][:, 0], *numbers, None, 5, seeds)
    torch.library.opcheck(torch.ops.specdecode.sample.default, arguments)


@each_method
def test_calls_that_are_not_compiled_do_not_go_through_an_operator(place, method):
    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.namespace)
            return function(*args, **(kwargs or {}))

    names: set[str] = set()
    sampler, call = make(method, place), inputs(place, draft_logits=True)
    with Recorder():
        sampler(**call, seeds=0)
        sampler.draft(call["target_logits"][:, 0], seeds=0)
        sample(call["target_logits"][:, 0], seeds=0)
    assert "aten" in names
    assert "specdecode" not in names
