"""The first rejected row of a request and its output, for every order in which programs finish."""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from specdecode.kernels import output
from specdecode.kernels.arguments import Constant, Drafts, Int32, Outputs, Pointer, Sizes
from specdecode.kernels.first_rejected import (
    EMPTY_BITS,
    FIELDS,
    REJECTED_BITS,
    add_row_bits,
    clear_state,
    first_row,
    is_last,
    load_empty,
    load_first_rejected,
    peek_first_rejected,
    publish_empty,
    publish_rejection,
    writes_output,
)
from specdecode.kernels.output import store_logprob, store_output, store_rejected_token, store_token
from specdecode.kernels.request import count_drafts, draft_at
from specdecode.kernels.values import RequestIndex, RowContext
from tests.support.kernels import DEVICE, every, needs_interpreter, orders, run_kernel, sizes_of

VOCAB = 1000


def outputs_of(num_draft_tokens: int) -> Outputs:
    """Return the outputs of one request, filled with numbers that no program writes."""
    token_ids = torch.full((num_draft_tokens + 1,), -7, device=DEVICE)
    counts = torch.full((2, 1), -7, dtype=torch.int32, device=DEVICE)
    logprobs = torch.full(token_ids.shape, -7.0, device=DEVICE)
    return Outputs(token_ids, *counts, torch.full((1,), True, device=DEVICE), None, None, logprobs)


def drafts_of(ids: torch.Tensor) -> Drafts:
    return Drafts(ids, *ids.stride(), None, 0, 0, None, 0, 0, None)


# ---------------------------------------------------------------------------------------------------------------------
# First rejections
# ---------------------------------------------------------------------------------------------------------------------


class Publication(NamedTuple):
    """Offsets to publish, and the values loaded before the first one and after each."""

    state_ptr: Pointer
    offsets_ptr: Pointer  # [count] int32
    found_ptr: Pointer  # [count + 1, 3] int32
    count: Int32
    sizes: Sizes


@triton.jit
def the_request(index, sizes):
    """Return a request whose drafts and rows are at its own index."""
    index = tl.full([], index, tl.int64)
    return RequestIndex(index, index, index, sizes.num_draft_tokens, sizes.vocab_size)


@triton.jit
def publish_kernel(given):
    request = the_request(1, given.sizes)
    clear_state(given.state_ptr, request)
    for i in range(given.count + 1):
        found_ptr = given.found_ptr + 3 * i
        tl.store(found_ptr, peek_first_rejected(given.state_ptr, request, given.sizes))
        tl.store(found_ptr + 1, load_first_rejected(given.state_ptr, request, given.sizes))
        tl.store(found_ptr + 2, load_empty(given.state_ptr, request, given.sizes))
        if i < given.count:
            offset = tl.load(given.offsets_ptr + i)
            publish_rejection(given.state_ptr, request, offset, given.sizes)
            publish_empty(given.state_ptr, request, offset, given.sizes)


@pytest.mark.parametrize("offsets", [[3, 4, 1, 2, 0], [5, 0], [0, 5]], ids=str)
def test_the_first_of_the_published_offsets_remains(offsets):
    memory = torch.full((3, FIELDS.value), -1, dtype=torch.int32, device=DEVICE)
    found = torch.zeros(len(offsets) + 1, 3, dtype=torch.int32, device=DEVICE)
    sizes = sizes_of(3, 5, VOCAB)
    run_kernel(
        publish_kernel,
        1,
        Publication(memory, torch.tensor(offsets, dtype=torch.int32, device=DEVICE), found, len(offsets), sizes),
    )
    first = [min([5, *offsets[:i]]) for i in range(len(offsets) + 1)]
    first_empty = [min([6, *offsets[:i]]) for i in range(len(offsets) + 1)]
    assert found.tolist() == [[stop, stop, empty] for stop, empty in zip(first, first_empty)]
    assert (memory[[0, 2]] == -1).all()


class Counts(NamedTuple):
    """The counter of programs, and the result of each."""

    count_ptr: Pointer  # [1] int32
    told_ptr: Pointer  # [programs] int32
    programs: Int32


@triton.jit
def count_kernel(counts):
    last = is_last(counts.count_ptr, counts.programs)
    tl.store(counts.told_ptr + tl.program_id(0), last.to(tl.int32))


def test_one_program_is_the_last():
    told = torch.full((20,), -1, dtype=torch.int32, device=DEVICE)
    run_kernel(count_kernel, 20, Counts(torch.zeros(1, dtype=torch.int32, device=DEVICE), told, 20))
    assert sorted(told.tolist()) == [0] * 19 + [1]


# ---------------------------------------------------------------------------------------------------------------------
# Drafts and output
# ---------------------------------------------------------------------------------------------------------------------


class Verified(NamedTuple):
    """A request whose drafts are counted and loaded one by one, and whose output is written."""

    drafts: Drafts
    outputs: Outputs
    count_ptr: Pointer  # [1] int32
    ids_ptr: Pointer  # [num_draft_tokens + 1] int32
    stop: Int32
    sizes: Sizes


@triton.jit
def output_kernel(verified):
    request = the_request(0, verified.sizes)
    counted = count_drafts(verified.drafts, request, verified.sizes)
    tl.store(verified.count_ptr, counted[0])
    for offset in range(verified.sizes.num_draft_tokens + 1):
        tl.store(verified.ids_ptr + offset, draft_at(counted, verified.drafts, request, offset, verified.sizes))
    stop = verified.stop
    store_output(verified.outputs, verified.drafts, counted, request, stop, stop > 1, verified.sizes)


@pytest.mark.parametrize(
    ("drafts", "had", "stop"),
    [(3, 3, 3), (3, 0, 0), (31, 31, 31), (32, 32, 32), (33, 32, 32), (70, 66, 65), (70, 70, 1)],
)
def test_drafts_end_at_the_first_that_is_no_token_and_the_output_at_the_stop(drafts, had, stop):
    ids = torch.arange(100, 100 + drafts).repeat_interleave(2)
    ids[2 * had : 2 * had + 1] = [-1, VOCAB, 2**40][drafts % 3]
    outputs, found = outputs_of(drafts), torch.full((drafts + 2,), -7, dtype=torch.int32, device=DEVICE)
    sizes = sizes_of(1, drafts, VOCAB)
    verified = Verified(drafts_of(ids.to(DEVICE)[None, ::2]), outputs, found[:1], found[1:], stop, sizes)
    run_kernel(output_kernel, 1, verified)
    wanted = list(range(100, 100 + had))
    assert found.tolist() == [had, *wanted, *[-1] * (drafts + 1 - had)]
    assert outputs.token_ids_ptr.tolist() == [*wanted[:stop], -7, *[-1] * (drafts - stop)]
    assert (outputs.logprobs_ptr[: stop + 1] == -7).all()  # log-probabilities of tokens are written elsewhere
    assert outputs.logprobs_ptr[stop + 1 :].isnan().all()
    assert [outputs.num_accepted_ptr.item(), outputs.num_drafts_ptr.item()] == [stop, had]
    assert outputs.invalid_ptr.item() is (stop > 1)


# ---------------------------------------------------------------------------------------------------------------------
# Row bits
# ---------------------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a request, each with a program of two steps: add the row bits, and write a token if rejected."""

    steps_ptr: Pointer  # [count, 2] int32: row and step
    stops_ptr: Pointer  # [rows] int32: whether each is rejected
    empty_ptr: Pointer  # [rows] int32: whether the row has no finite logit
    state_ptr: Pointer  # [1] int64
    drafts: Drafts
    outputs: Outputs
    count: Int32
    sizes: Sizes
    IS_DRAWN: Constant


@triton.jit
def take_step(rows, offset, step):
    """Run one step like `emit.emit_row`: an already drawn token is written first, any other token after the bits are added.

    The log-probability of an accepted draft is written before its row's bits are added.
    """
    request = the_request(0, rows.sizes)
    context = RowContext(request, offset, -1, (0, 0), 1.0)
    stops = tl.load(rows.stops_ptr + offset) == 1
    is_empty = tl.load(rows.empty_ptr + offset) == 1
    bits = tl.full([], 0, tl.int64)
    if (step == 0) == (rows.IS_DRAWN == 0):
        if stops == 0:
            store_logprob(rows.outputs, context, -1.0 - offset, rows.sizes)
        bits = add_row_bits(rows.state_ptr, context, stops, is_empty, True)
    elif rows.IS_DRAWN:
        if stops:
            store_token(rows.outputs, context, 100 + offset, -100.0 - offset, rows.sizes)
    else:
        bits = store_rejected_token(rows.outputs, rows.state_ptr, context, 100 + offset, -100.0 - offset, rows.sizes)
    finishes = tl.full([], False, tl.int1)
    if (step == 1) | ((stops == 0) & (rows.IS_DRAWN == 0)):
        finishes = writes_output(rows.state_ptr, context, bits, rows.sizes, rows.IS_DRAWN)
    if finishes:
        stop = first_row(bits, REJECTED_BITS)
        counted = count_drafts(rows.drafts, request, rows.sizes)
        is_invalid = first_row(bits, EMPTY_BITS) <= stop
        store_output(rows.outputs, rows.drafts, counted, request, stop, is_invalid, rows.sizes)


@triton.jit
def rows_kernel(rows):
    for i in range(rows.count):
        take_step(rows, tl.load(rows.steps_ptr + 2 * i), tl.load(rows.steps_ptr + 2 * i + 1))


ROWS = 3


def with_steps(order: list[int]) -> list[tuple[int, int]]:
    """Number the steps of each program in an order of programs."""
    return [(row, order[:i].count(row)) for i, row in enumerate(order)]


def assert_output_is_right(steps: list[tuple[int, int]], stops: list[int], empty: int | None, is_drawn: bool) -> None:
    def flags(rows) -> torch.Tensor:
        return torch.tensor([int(row in rows) for row in range(ROWS)], dtype=torch.int32, device=DEVICE)

    drafts, outputs = torch.tensor([[7, 8]], device=DEVICE), outputs_of(ROWS - 1)
    # As 32-bit numbers, like the state of a request.
    memory = torch.zeros(FIELDS.value, dtype=torch.int32, device=DEVICE)
    order = torch.tensor(steps, dtype=torch.int32, device=DEVICE)
    sizes = sizes_of(1, ROWS - 1, VOCAB)
    rows = Rows(order, flags(stops), flags([empty]), memory, drafts_of(drafts), outputs, len(steps), sizes, is_drawn)
    run_kernel(rows_kernel, 1, rows)
    stop = stops[0]
    assert outputs.token_ids_ptr.tolist() == [*[7, 8][:stop], 100 + stop, *[-1] * (ROWS - 1 - stop)], steps
    logprobs = [*[-1.0, -2.0][:stop], -100.0 - stop, *[7.0] * (ROWS - 1 - stop)]
    assert outputs.logprobs_ptr.nan_to_num(nan=7).tolist() == logprobs, steps
    assert [outputs.num_accepted_ptr.item(), outputs.num_drafts_ptr.item()] == [stop, ROWS - 1], steps
    assert outputs.invalid_ptr.item() is (empty is not None and empty <= stop), steps


where_it_can_stop = pytest.mark.parametrize("stops", [[2], [0, 2], [1, 2], [0, 1, 2]], ids=str)


@pytest.mark.parametrize(("empty", "is_drawn"), [(None, False), (1, False), (1, True)])
@where_it_can_stop
def test_a_small_batch_is_put_together_whatever_the_order(stops, empty, is_drawn):
    counts = [2 if is_drawn or row in stops else 1 for row in range(ROWS)]
    for order in every(orders(counts), 90):
        assert_output_is_right(with_steps(order), stops, empty, is_drawn)


@needs_interpreter
@where_it_can_stop
def test_it_is_so_if_others_take_steps_while_a_program_hands_in_its_token(stops, monkeypatch):
    """The steps come between its check, which finds missing bits, and the write of its token."""
    take, are_complete = take_step, output.are_complete
    wrote, nested, waiting = None, [], []

    def take_noting(rows, offset, step):
        waiting[:] = [(rows, nested)] if (int(offset), int(step)) == wrote else []
        take(rows, offset, step)

    def look(bits, sizes):
        complete = are_complete(bits, sizes)
        for rows, steps in [waiting.pop() for _ in waiting]:
            for row, step in steps:
                take(rows, tl.full([], row, tl.int32), tl.full([], step, tl.int32))
        return complete

    monkeypatch.setitem(globals(), "take_step", take_noting)
    monkeypatch.setattr(output, "are_complete", look)
    cases = []
    for order in orders([2 if row in stops else 1 for row in range(ROWS)]):
        steps = with_steps(order)
        for last, (row, step) in enumerate(steps):
            cases += [(steps, last, looked) for looked in range(steps.index((row, 0)) + 1, last) if step == 1]
    for steps, last, looked in every(cases, 60):
        wrote, nested = steps[last], steps[looked:last]
        assert_output_is_right(steps[:looked] + steps[last:], stops, None, False)
        assert not waiting
