"""Results do not depend on the state of PyTorch, and sums are the same to the last bit in any batch and layout."""

import pytest
import torch
from torch import Tensor

from specdecode import sample
from specdecode.arguments import check_seeds
from specdecode.noise import BLOCK_SIZE
from tests.support.batches import row_batch, verification_batch
from tests.support.calls import (
    NAN,
    SAMPLING_NAMES,
    by_ratio,
    each_method,
    ids,
    make,
    make_call,
)
from tests.support.differential import assert_same


def last_dimension_first(tensor: Tensor) -> Tensor:
    return tensor.permute(*reversed(range(tensor.ndim))).contiguous().permute(*reversed(range(tensor.ndim)))


def inside(tensor: Tensor, fill: float) -> Tensor:
    """Return the same values as a slice of a larger tensor, like an embedding with a padded vocabulary."""
    size = [length + 3 for length in tensor.shape]
    larger = torch.full(size, fill, dtype=tensor.dtype, device=tensor.device)
    view = larger[tuple(slice(2, 2 + length) for length in tensor.shape)]
    view.copy_(tensor)
    return view


@each_method
def test_expanded_inputs_are_rows_like_any_other(place, method):
    call = make_call(place, batch=1, vocab=7)
    call["draft_token_ids"].clamp_(min=0)
    expanded = {name: value.expand(20, *value.shape[1:]) for name, value in call.items()}
    repeated = {name: value.contiguous() for name, value in expanded.items()}
    assert_same(make(method, place)(**expanded), make(method, place)(**repeated))
    even = torch.zeros(1, 1, 1, device=place[1])
    flat = {"target_logits": even.expand(20, 4, 7), "draft_logits": even.expand(20, 3, 7), "seeds": 0}
    output = make(method, place)(draft_token_ids=repeated["draft_token_ids"], **flat)
    flat = {"target_logits": torch.zeros(20, 4, 7, device=place[1]), "draft_logits": None, "seeds": 0}
    if method != "strict":
        flat["draft_logits"] = torch.zeros(20, 3, 7, device=place[1])
    assert_same(output, make(method, place)(draft_token_ids=repeated["draft_token_ids"], **flat))


UNUSUAL = {
    "negated lazily": lambda tensor: torch._neg_view(-tensor),
    "zeros that are not in memory": lambda tensor: torch._efficientzerotensor(
        tensor.shape, dtype=tensor.dtype, device=tensor.device
    ),
    "a conjugate's imaginary part": lambda tensor: (
        torch.complex(tensor, -tensor).conj().imag if tensor.dtype == torch.float32 else tensor
    ),
    "of which gradients are wanted": lambda tensor: (
        tensor.clone().requires_grad_() if tensor.dtype == torch.float32 else tensor
    ),
}


@pytest.mark.parametrize("unusual", UNUSUAL.values(), ids=UNUSUAL)
def test_backends_get_tensors_whose_values_are_in_memory(place, unusual):
    # Kernels read memory at an address, where PyTorch may have postponed zeros or a negation.
    call = make_call(place)
    call["draft_token_ids"].clamp_(min=0)
    call["draft_logsumexp"] = call["draft_logits"].logsumexp(dim=2)
    call = {name: unusual(value) for name, value in call.items()}
    assert all(
        value._is_zerotensor() or value.is_neg() or value.requires_grad
        for value in call.values()
        if value.dtype == torch.float32
    )
    rows = {"logits": call["target_logits"][:, 0], **{name: call[name] for name in SAMPLING_NAMES}}
    for given, batch in ((call, verification_batch(**call)), (rows, row_batch(**rows))):
        for name, value in given.items():
            got = getattr(batch, name)
            assert not got._is_zerotensor(), name
            assert not got.is_neg(), name
            assert not got.requires_grad, name
            assert torch.equal(got, value), name
    plain = {name: value.detach().clone().resolve_neg() for name, value in call.items()}
    assert_same(make("block", place)(**call), make("block", place)(**plain))


@pytest.fixture
def two_threads():
    """Run with two threads: PyTorch splits long sums over threads if the batch is too small to keep them busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def accept_threshold(place, method: str, target: Tensor, requests, layout) -> list[int]:
    """Return the lowest logit of each request's first draft at which it is accepted, as the bits of a float32.

    There is a second draft, so that a block's residual mass takes part.
    """
    target, drafted = target[requests].clone(), ids(place, 5, 6, requests=len(requests))
    draft = target[:, :2] * 0.8
    draft[:, :, 5:7] = 12
    sampler, seeds = make(method, place), torch.tensor(requests, device=place[1])

    def is_accepted(order: Tensor) -> Tensor:
        # Positive float32 numbers are ordered as their bits are.
        target[:, 0, 5] = order.to(torch.int32).view(torch.float32)
        return sampler(layout(target), drafted, layout(draft), seeds=seeds).num_accepted >= 1

    low = torch.tensor([1e-6] * len(requests), device=place[1]).view(torch.int32).long()
    high = torch.tensor([60.0] * len(requests), device=place[1]).view(torch.int32).long()
    assert bool(is_accepted(high).all())
    assert not bool(is_accepted(low).any())
    while int((high - low).max()) > 1:
        middle = (low + high) // 2
        accepted = is_accepted(middle)
        low, high = low.where(accepted, middle), middle.where(accepted, high)
    return high.tolist()


@pytest.mark.usefixtures("two_threads")
@by_ratio
@pytest.mark.parametrize("vocab", [300, 3 * BLOCK_SIZE + 5, 40 * BLOCK_SIZE])
def test_decisions_are_the_same_to_the_last_bit_in_any_batch_and_layout(place, vocab, method):
    # Equal tokens may hide sums that differ by a rounding, so find the exact logit at which a draft is accepted.
    # The eager backend uses PyTorch's sums, whose order on CUDA depends on the shape of the whole batch.
    if place == ("eager", "cuda"):
        pytest.skip("PyTorch's CUDA reductions depend on the batch in the last bit")
    batch = 6
    target = (2 * torch.randn(batch, 3, vocab, generator=torch.Generator().manual_seed(3))).to(place[1])
    together = accept_threshold(place, method, target, range(batch), layout=lambda tensor: tensor)
    assert accept_threshold(place, method, target, range(batch), layout=last_dimension_first) == together
    alone = [accept_threshold(place, method, target, [i], layout=lambda tensor: tensor)[0] for i in range(batch)]
    assert alone == together


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [300, 3 * BLOCK_SIZE + 5, 40 * BLOCK_SIZE])
def test_residuals_are_the_same_to_the_last_bit_in_any_batch_and_layout(place, vocab):
    # p and q are nearly flat and differ only by roundings, so that another order of additions changes the residual.
    if place == ("eager", "cuda"):
        pytest.skip("PyTorch's CUDA reductions depend on the batch in the last bit")
    call = make_call(place, batch=24, drafts=1, vocab=vocab)
    noise = torch.randn(24, 1, vocab, generator=torch.Generator().manual_seed(7)).to(place[1])
    call["draft_logits"] = call["target_logits"][:, :1] * (1 + 2e-7 * noise)
    call["draft_token_ids"].fill_(0)
    call["temperature"].fill_(40.0)
    sampler = make("synthetic", place, rates=[0.0])
    together = sampler(**call).token_ids.tolist()
    assert sampler(**{name: last_dimension_first(value) for name, value in call.items()}).token_ids.tolist() == together
    alone = [{name: value[i : i + 1] for name, value in call.items()} for i in range(24)]
    assert [sampler(**each).token_ids.tolist()[0] for each in alone] == together


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [300, 3 * BLOCK_SIZE + 5, 40 * BLOCK_SIZE])
def test_logsumexp_is_the_same_to_the_last_bit_in_any_batch_and_layout(place, vocab):
    if place == ("eager", "cuda"):
        pytest.skip("PyTorch's CUDA reductions depend on the batch in the last bit")
    logits = (2 * torch.randn(16, vocab, generator=torch.Generator().manual_seed(4))).to(place[1])
    sampler = make("probabilistic", place)
    together = sampler.draft(logits, 0.7, seeds=0).logsumexp.tolist()
    assert [sampler.draft(logits[i : i + 1], 0.7, seeds=i).logsumexp.item() for i in range(16)] == together
    assert sampler.draft(last_dimension_first(logits), 0.7, seeds=0).logsumexp.tolist() == together
    assert sampler.draft(inside(logits, NAN), 0.7, seeds=0).logsumexp.tolist() == together


@each_method
def test_gradients_are_neither_needed_nor_made(place, method):
    call = make_call(place)
    expected = make(method, place)(**call)
    call["draft_logsumexp"] = torch.logsumexp(
        call["draft_logits"] / call["temperature"][:, None, None].clamp(0.1), dim=2
    )
    for name in ("target_logits", "draft_logits", "temperature", "draft_logsumexp"):
        call[name].requires_grad_()
    output = make(method, place)(**call)
    draft = make(method, place).draft(call["target_logits"][:, 0], call["temperature"], 0)
    tokens = sample(call["target_logits"][:, 0], call["temperature"], 0)
    assert not any(value.requires_grad for value in (*output[:4], output.num_tokens, *draft[:2], tokens))
    del call["draft_logsumexp"]
    call["target_logits"] = torch.nn.Parameter(call["target_logits"].detach())
    assert_same(make(method, place)(**call), expected)


@each_method
def test_tensors_made_in_inference_mode_are_as_good(place, method):
    expected = make(method, place)(**make_call(place))
    sampler = make(method, place)
    with torch.inference_mode():
        call = make_call(place)
        assert_same(sampler(**call), expected)
    assert_same(sampler(**call), expected)  # cached tensors can be used outside, too


@each_method
def test_no_seeds_means_fresh_ones_of_the_default_generator(place, method):
    target = torch.zeros(8, 1, 2 * BLOCK_SIZE, device=place[1])  # even: two draws agree with probability 2,048^-8
    uses = {
        "call": lambda: make(method, place)(target, ids(place, requests=8)).token_ids.tolist(),
        "draft": lambda: make(method, place).draft(target[:, 0]).token_ids.tolist(),
        "sample": lambda: sample(target[:, 0]).tolist(),
    }
    for name, use in uses.items():
        torch.manual_seed(1)
        first, second = use(), use()
        torch.manual_seed(1)
        assert use() == first, name
        assert first != second, name
        assert len(set(map(str, first))) > 1, name  # requests of one call have different seeds, too


def test_fresh_seeds_have_64_random_bits(place):
    # Each bit is set in half of 10,000 seeds: outside 4,750..5,250 with probability 6e-7 for each of 64 bits.
    torch.manual_seed(0)
    seeds = check_seeds(None, 10_000, torch.device(place[1]))
    counts = [int((seeds >> bit & 1).sum()) for bit in range(64)]
    assert all(4750 <= count <= 5250 for count in counts), counts


@each_method
def test_given_seeds_leave_the_generator_alone(place, method):
    call = make_call(place)
    generators = [torch.get_rng_state] + ([torch.cuda.get_rng_state] if place[1] == "cuda" else [])
    states = [generator().tolist() for generator in generators]
    for seeds in (0, call["seeds"]):
        make(method, place)(**call | {"seeds": seeds})
        make(method, place).draft(call["target_logits"][:, 0], seeds=seeds)
        sample(call["target_logits"][:, 0], seeds=seeds)
    assert [generator().tolist() for generator in generators] == states


def test_default_dtype_and_device_do_not_matter(place):
    call = make_call(place)
    outputs = []
    for dtype in (torch.float32, torch.float64, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            outputs.append(make("probabilistic", place)(**call | {"temperature": 0.7, "positions": None}))
            outputs.append(make("block", place)(**call | {"temperature": 0.7, "positions": None}))
            outputs.append(make("synthetic", place)(**call | {"temperature": 0.7, "positions": None}))
        finally:
            torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        outputs.append(make("probabilistic", place)(**call | {"temperature": 0.7, "positions": None}))
        outputs.append(make("block", place)(**call | {"temperature": 0.7, "positions": None}))
        outputs.append(make("synthetic", place)(**call | {"temperature": 0.7, "positions": None}))
    for one, other in zip(outputs, outputs[3:]):
        assert_same(one, other)
