"""`validate="values"` refuses probabilities in place of logits, in every layout of a call, and no other values."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from specdecode import AcceptanceSchedule, RejectionSampler, VocabShard, validation
from tests.conftest import ON_GPU
from tests.support.calls import METHODS
from tests.support.differential import Case, case
from tests.support.packing import in_slots, packed_rows, with_counts
from tests.support.ranks import Ranks

NAN = float("nan")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def sampler_of(
    method: str = "probabilistic", backend: str = "auto", shard: VocabShard | None = None, **options: Any
) -> RejectionSampler:
    schedule = AcceptanceSchedule.from_rates([0.9, 0.5]) if method == "synthetic" else None
    return RejectionSampler(
        method, backend=backend, schedule=schedule, shard=shard, **({"validate": "values"} | options)
    )


def random_case() -> Case:
    """Return three requests, with two drafts, one and none."""
    return with_counts(replace(case(3, 2, 1100, torch.float32), draft_token_ids=torch.zeros(3, 2).long()), [2, 1, 0])


def with_probabilities(batch: Case, of: str, dtype: torch.dtype = torch.float32) -> Case:
    """Return the batch with probabilities in place of the logits `of` one model.

    Unused rows of these logits are 7, and unused rows of the other model's are NaN.
    """
    batch = replace(batch, target_logits=batch.target_logits.clone(), draft_logits=batch.draft_logits.clone())
    for request, count in enumerate([2, 1, 0]):
        batch.target_logits[request, count + 1 :] = NAN
        batch.draft_logits[request, count:] = NAN
    probabilities = vars(batch)[of].softmax(dim=-1)
    return replace(batch, **{of: probabilities.nan_to_num(nan=7).to(dtype)})


def arguments(batch: Case, device: str = "cpu") -> dict[str, Any]:
    return {**vars(batch.to(device))}


def packed_arguments(batch: Case) -> dict[str, Any]:
    """Return the arguments of a packed call; unused slots hold invalid values."""
    slots = torch.tensor([4, 0, 2])
    names = ("draft_logits", "temperature", "seeds")
    return {
        **packed_rows(batch, [2, 1, 0]),
        **{name: in_slots(vars(batch)[name], slots, 5) for name in names},
        "slots": slots,
    }


@pytest.mark.parametrize("of", ["target_logits", "draft_logits"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_probabilities_are_refused_by_the_name_of_the_argument(place, method, dtype, of):
    call = arguments(with_probabilities(random_case(), of, dtype), place[1])
    count = {"target_logits": 6, "draft_logits": 3}[of]
    error = (
        rf"^{of}: expected raw logits, got probabilities: no number is negative, and each of {count} rows sums to 1 \("
    )
    with pytest.raises(ValueError, match=error):
        sampler_of(method, place[0])(**call)
    with pytest.raises(ValueError, match=error):
        sampler_of(method, place[0]).warmup(**call)
    sampler_of(method, place[0], validate=None)(**call)


@pytest.mark.parametrize("of", ["target_logits", "draft_logits"])
def test_probabilities_in_packed_calls_are_refused_whatever_unused_rows_and_slots_hold(of):
    call = packed_arguments(with_probabilities(random_case(), of))
    count = {"target_logits": 6, "draft_logits": 3}[of]
    with pytest.raises(ValueError, match=f"^{of}: expected raw logits, got probabilities: .* each of {count} rows"):
        sampler_of().packed(**call)
    sampler_of(validate=None).packed(**call)
    sampler_of().packed(**packed_arguments(random_case()))


def test_probabilities_in_draft_are_refused(place):
    logits = torch.randn(4, 1100, device=place[1])
    sampler = sampler_of(backend=place[0])
    assert torch.equal(
        sampler.draft(logits, seeds=0).token_ids, sampler.draft(logits.log_softmax(1), seeds=0).token_ids
    )
    with pytest.raises(
        ValueError, match=r"^logits: expected raw logits, got probabilities: .* each of 4 rows sums to 1"
    ):
        sampler.draft(logits.softmax(1), seeds=0)


def test_probabilities_over_the_drafts_own_vocabulary_are_refused():
    batch = random_case()
    call = arguments(batch) | {"draft_vocab_ids": torch.arange(0, 1100, 4)}
    short = batch.draft_logits[..., ::4]
    sampler_of()(**call | {"draft_logits": short})
    with pytest.raises(ValueError, match=r"^draft_logits: expected raw logits, got probabilities: "):
        sampler_of()(**call | {"draft_logits": short.softmax(dim=2)})


@pytest.mark.parametrize("bounds", [[0, 1024, 1100], [0, 300, 300, 1100]], ids=str)
def test_probabilities_in_shards_are_refused_by_every_rank(bounds):
    """Only the sums over all ranks are 1."""
    ranks = Ranks(bounds)

    def error_of(call: dict[str, Any], name: str) -> None:
        def make(shard: VocabShard) -> Any:
            def refused(**mine: Any) -> None:
                sampler = sampler_of(backend="eager", shard=shard)
                with pytest.raises(ValueError, match=f"^{name}: expected raw logits, got probabilities"):
                    (sampler if "target_logits" in mine else sampler.draft)(**mine)

            return refused

        ranks.run(make, call)

    batch = random_case()
    for name in ("target_logits", "draft_logits"):
        error_of(arguments(with_probabilities(batch, name)), name)
    error_of({"logits": batch.draft_logits[:, 0].softmax(dim=1), "seeds": 0}, "logits")
    short = arguments(batch) | {
        "draft_vocab_ids": torch.arange(0, 1100, 4),
        "draft_logits": batch.draft_logits[..., ::4],
    }
    error_of(short | {"draft_logits": short["draft_logits"].softmax(dim=2)}, "draft_logits")
    ranks.run(lambda shard: sampler_of(backend="eager", shard=shard), arguments(batch))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised in PyTorch
def test_probabilities_in_compiled_calls_are_refused():
    torch._dynamo.reset()
    sampler, call = sampler_of(), arguments(random_case())
    verify = torch.compile(lambda call: sampler(**call).token_ids, backend="aot_eager")
    draft = torch.compile(lambda logits: sampler.draft(logits, seeds=0).token_ids, backend="aot_eager")
    rows = call["draft_logits"][:, 0]
    assert torch.equal(verify(call), sampler(**call).token_ids)
    assert torch.equal(draft(rows), sampler.draft(rows, seeds=0).token_ids)
    with pytest.raises(ValueError, match=r"^target_logits: expected raw logits, got probabilities: "):
        verify(call | {"target_logits": call["target_logits"].softmax(dim=2)})
    with pytest.raises(ValueError, match=r"^logits: expected raw logits, got probabilities: "):
        draft(rows.softmax(dim=1))


def other_rows(probabilities: Tensor) -> dict[str, Tensor]:
    """Return rows that are not probabilities, at least one in each tensor, by their kind."""
    one_negative = probabilities.clone()
    one_negative[1, 0, 5] = -1e-3
    one_nan = probabilities.clone()
    one_nan[0, 0, 5] = NAN
    one_of_logits = probabilities.clone()
    one_of_logits[0, 0] = torch.randn(probabilities.shape[-1], generator=torch.Generator().manual_seed(0))
    return {
        "log-probabilities": probabilities.log(),
        "a negative number": one_negative,
        "NaN": one_nan,
        "a row of logits": one_of_logits,
        "sums of 0.98": probabilities * 0.98,
        "sums of 1.02": probabilities * 1.02,
        "zeros": torch.zeros_like(probabilities),
    }


@pytest.mark.parametrize("kind", other_rows(torch.ones(2, 1, 9) / 9))
def test_other_rows_give_the_same_tokens_as_without_the_check(place, kind):
    batch = random_case()
    call = arguments(batch, place[1])
    call["target_logits"] = other_rows(batch.target_logits.softmax(dim=2))[kind].to(place[1])
    checked, unchecked = (sampler_of(backend=place[0], validate=how)(**call) for how in ("values", None))
    assert all(torch.equal(one, other) for one, other in zip(checked[:4], unchecked[:4]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.0, 3.0, 30.0], ids=["even", "usual", "peaked"])
def test_probabilities_of_a_whole_vocabulary_are_known_in_every_dtype(scale, dtype):
    logits = scale * torch.randn(2, 1, 151_936, generator=torch.Generator().manual_seed(0))
    drafts = torch.zeros(2, 0, dtype=torch.int64)
    for rows in (logits.softmax(dim=2).to(dtype), logits.to(dtype).softmax(dim=2).float()):
        with pytest.raises(ValueError, match=r"^target_logits: expected raw logits, got probabilities: "):
            sampler_of()(rows, drafts, seeds=0)
    sampler_of()(logits.to(dtype), drafts, seeds=0)


def test_steps_without_rows_have_nothing_to_refuse(place):
    sampler, device = sampler_of(backend=place[0]), place[1]
    none = torch.zeros(0, 2, dtype=torch.int64, device=device)
    assert sampler(torch.zeros(0, 3, 9, device=device), none, torch.zeros(0, 2, 9, device=device)).token_ids.shape == (
        0,
        3,
    )
    rows = torch.full((4, 9), 1 / 9, device=device)  # probabilities, in rows of no request
    starts = torch.tensor([2, 2, 2], device=device)
    output = sampler.packed(rows, none.new_zeros(4), starts, num_draft_tokens=2)
    assert output.invalid.tolist() == [True, True]


@pytest.mark.parametrize("call", ["verify", "draft", "packed"])
def test_nothing_is_checked_unless_asked(call):
    """Then no row is read, and the host does not wait for the device."""
    batch = random_case()
    with mock.patch.object(validation, "refuse_probabilities") as refuse:
        for how, times in ((None, 0), ("values", 1)):
            sampler = sampler_of(validate=how)
            if call == "verify":
                sampler(batch.target_logits, batch.draft_token_ids, seeds=0)
            elif call == "packed":
                sampler.packed(**packed_rows(batch, [2, 1, 0]), seeds=0)
            else:
                sampler.draft(batch.draft_logits[:, 0], seeds=0)
            assert refuse.call_count == times


@pytest.mark.parametrize("wrong", ["value", True, "", ["values"]])
def test_another_value_is_an_error_that_names_the_argument(wrong):
    with pytest.raises(ValueError, match=r"^validate: expected one of 'values', got"):
        RejectionSampler("strict", validate=wrong)


def test_a_sampler_says_what_it_checks():
    assert repr(sampler_of("strict")) == "RejectionSampler('strict', backend='auto', validate='values')"
    assert "validate" not in repr(sampler_of("strict", validate=None))


CAPTURED = (
    r"^validate: expected None while a CUDA graph is captured, because the check waits for the device, got 'values'$"
)


def test_a_capture_is_refused_with_what_to_pass():
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
        validation.refuse_capture(torch.device("cpu"))
        with pytest.raises(ValueError, match=CAPTURED):
            validation.refuse_capture(torch.device("cuda"))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_calls_that_are_captured_are_refused():
    rows, none = torch.zeros(1, 1, 1100, device="cuda"), torch.zeros(1, 0, dtype=torch.int64, device="cuda")
    sampler, seeds = sampler_of("strict"), torch.zeros(1, dtype=torch.int64, device="cuda")
    sampler(rows, none, seeds=seeds)
    for call in (lambda: sampler(rows, none, seeds=seeds), lambda: sampler.draft(rows[:, 0], seeds=seeds)):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ValueError, match=CAPTURED), torch.cuda.graph(graph):
            call()
