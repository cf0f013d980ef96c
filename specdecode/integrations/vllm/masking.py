"""The masks of a step's rows, a bit for each token: one kernel writes them from vLLM's own state.

vLLM sets the logits of forbidden tokens to -inf, some of them before it adds biases and penalties. Biases and penalties
do not change -inf, so all masks can be applied last, as `Adjustments.allowed_mask`. In vLLM's order, for each row:

1. the request's list of allowed tokens, if it has one, and its grammar's allowed tokens;
2. without its stop tokens, while its text is below the minimum length. If no token is left, the stop tokens stay;
3. without the last token of each bad word, if the row's text ends with the word's other tokens;
4. only the token that a thinking budget forces, if it does: vLLM sets its logit to 1e9.

A row's text is the committed text, which vLLM holds by slot, followed by the drafts before the row. One program writes
the words of one row, vocab / 8 bytes, and reads no logits.
"""
# Functions compiled by Triton have no Python types.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specdecode import adjustments
from specdecode.integrations.vllm.grammars import StepGrammar
from specdecode.integrations.vllm.steps import StepInputs

WORD = tl.constexpr(adjustments.WORD)
TILE = tl.constexpr(1024)
"""Words that are written at once."""
BLOCK_N = tl.constexpr(128)
"""Tokens, or words of text, that are compared at once."""
VALUES = tl.constexpr(7)
"""The values of a slot: the numbers of allowed tokens and of stop tokens, the minimum length, whether stop tokens are
restored, the numbers of bad words and of prompt tokens, and the thinking budget, -1 for none."""


class Rows(NamedTuple):
    """The rows of a step, as vLLM has them."""

    slots: Tensor  # [num_rows] int64, the slot of each row's request
    positions: Tensor  # [num_rows] int64, of the token that is fed
    offsets: Tensor  # [num_rows] int32, the index of each row in its request
    fed: Tensor  # [num_rows] int32, the token that is fed: a request's last, then its drafts


class Limits(NamedTuple):
    """The limits of requests' tokens, by slot."""

    numbers: Tensor  # [num_slots, 7] int32: see `VALUES`
    allowed: Tensor  # [num_slots, ...] int32, ids
    allowed_stride: int
    stops: Tensor  # [num_slots, ...] int32, ids
    stops_stride: int
    bad_tokens: Tensor  # [num_slots, ...] int32: the tokens of all bad words, one word after the other
    bad_tokens_stride: int
    bad_starts: Tensor  # [num_slots, ...] int32: the start of each word in them, and the end of the last
    bad_starts_stride: int
    text: Tensor  # [num_slots, ...] int32, committed tokens
    text_stride: int
    text_length: Tensor  # [num_slots] int32


class Thinking(NamedTuple):
    """The tokens that begin and end thoughts, and the last begin and end in each request's text."""

    last_start: Tensor  # [num_slots] int32, the index in the committed text; -1 for never
    last_end: Tensor  # the same for the end
    start_ids: Tensor  # [num_start] int32: the tokens that begin a thought
    num_start: int
    end_ids: Tensor  # the tokens that end it without being forced
    num_end: int
    forced_ids: Tensor  # the tokens that end it when the budget is spent
    num_forced: int


class Grammar(NamedTuple):
    """The tensors of a `StepGrammar`."""

    masks: Tensor
    mapping: Tensor
    requests: Tensor


class Text(NamedTuple):
    """The text of a row."""

    ptr: Any
    num_committed: Any
    drafts_ptr: Any


@triton.jit
def text_at(text, places, wanted):
    """Return the tokens of a text at given indices."""
    offsets = places - text.num_committed
    committed = tl.load(text.ptr + places, mask=wanted & (offsets < 0), other=-1)
    return tl.where(offsets < 0, committed, tl.load(text.drafts_ptr + offsets, mask=wanted & (offsets >= 0), other=-1))


@triton.jit
def ends_with(text, length, ids_ptr, count):
    """Return whether the first `length` tokens of a text end with the first `count` ids of a list."""
    mismatch = (length < count).to(tl.int32)
    for first in range(0, count, BLOCK_N):
        lanes = first + tl.arange(0, BLOCK_N)
        wanted = (lanes < count) & (length >= count)
        ids = tl.load(ids_ptr + lanes, mask=wanted, other=-1)
        differs = wanted & (ids != text_at(text, length - count + lanes, wanted))
        mismatch = tl.maximum(mismatch, tl.max(differs.to(tl.int32), 0))
    return mismatch == 0


@triton.jit
def forced_token(text, length, slot, budget, thinking):
    """Return the token that a thinking budget forces after the first `length` tokens of a text, -1 for none."""
    last_start, last_end = tl.load(thinking.last_start + slot), tl.load(thinking.last_end + slot)
    for end in range(text.num_committed + 1, length + 1):  # the drafts may begin or end it
        begins = ends_with(text, end, thinking.start_ids, thinking.num_start)
        last_start = tl.where(begins, end - thinking.num_start, last_start)
        ends = ends_with(text, end, thinking.end_ids, thinking.num_end)
        last_end = tl.where(ends, end - thinking.num_end, last_end)
    token = tl.full([], -1, tl.int32)
    spent = length - (last_start + thinking.num_start)
    if (last_start >= 0) & (last_start > last_end) & (spent >= budget):
        there = tl.full([], 0, tl.int32)  # the number of forced tokens at the end of the text
        for count in range(1, thinking.num_forced):
            there = tl.where(ends_with(text, length, thinking.forced_ids, count), count, there)
        token = tl.load(thinking.forced_ids + there)
    return token


@triton.jit
def grammar_of(slot, offset, grammar, num_masks, mask_stride):
    """Return the index of a row's mask, -1 for none."""
    found = tl.full([], -1, tl.int32)
    for first in range(0, num_masks, BLOCK_N):
        lanes = first + tl.arange(0, BLOCK_N)
        mapping = tl.load(grammar.mapping + lanes, mask=lanes < num_masks, other=-1)
        request = mapping // mask_stride
        slots = tl.load(grammar.requests + request, mask=mapping >= 0, other=-1)
        is_own = (slots == slot) & (mapping - request * mask_stride == offset)
        found = tl.maximum(found, tl.max(tl.where(is_own, lanes, -1), 0))
    return found


@triton.jit
def change_bits(words_ptr, ids, ALLOWED: tl.constexpr, VOCAB_SIZE: tl.constexpr):
    """Set the bits of tokens if `ALLOWED`, otherwise clear them; ids outside the vocabulary are ignored."""
    is_token, bits = (ids >= 0) & (ids < VOCAB_SIZE), (ids * 0 + 1) << (ids & (WORD - 1))
    if ALLOWED:
        tl.atomic_or(words_ptr + ids // WORD, bits, mask=is_token, sem="relaxed")
    else:
        tl.atomic_and(words_ptr + ids // WORD, ~bits, mask=is_token, sem="relaxed")


@triton.jit
def begin(words_ptr, allowed_ptr, num_allowed, masks_ptr, width, forced, VOCAB_SIZE: tl.constexpr):
    """Write a row's words: a forced token, or without one the tokens that a list and a grammar allow."""
    for first in range(0, VOCAB_SIZE, TILE * WORD):
        places = first // WORD + tl.arange(0, TILE)
        rest = VOCAB_SIZE - places * WORD  # clear bits beyond the vocabulary
        words = tl.where(rest >= WORD, -1, (1 << tl.minimum(tl.maximum(rest, 0), WORD - 1)) - 1)
        if forced >= 0:
            words = tl.where(places == forced // WORD, 1 << (forced & (WORD - 1)), 0)
        elif num_allowed > 0:
            words = tl.zeros_like(words)
        else:
            words &= tl.load(masks_ptr + places, mask=places < width, other=-1)
        tl.store(words_ptr + places, words, mask=rest > 0)
    tl.debug_barrier()
    if (forced < 0) & (num_allowed > 0):
        for first in range(0, num_allowed, BLOCK_N):
            lanes = first + tl.arange(0, BLOCK_N)
            ids = tl.load(allowed_ptr + lanes, mask=lanes < num_allowed, other=-1)
            places = ids // WORD
            masks = tl.load(masks_ptr + places, mask=(ids >= 0) & (places < width), other=-1)
            ids = tl.where((masks >> (ids & (WORD - 1))) & 1 != 0, ids, -1)
            change_bits(words_ptr, ids, True, VOCAB_SIZE)
        tl.debug_barrier()


@triton.jit
def is_empty(words_ptr, VOCAB_SIZE: tl.constexpr):
    """Return whether a row allows no token."""
    found = tl.zeros([TILE], tl.int32)
    for first in range(0, VOCAB_SIZE, TILE * WORD):
        places = first // WORD + tl.arange(0, TILE)
        found |= tl.load(words_ptr + places, mask=places * WORD < VOCAB_SIZE, other=0)
    return tl.max((found != 0).to(tl.int32), 0) == 0


@triton.jit
def forbid_bad_words(words_ptr, text, length, num_output, tokens_ptr, starts_ptr, num_words, VOCAB_SIZE: tl.constexpr):
    """Clear the last token of each bad word whose other tokens end the text, the prompt excluded."""
    for first in range(0, num_words, BLOCK_N):
        lanes = first + tl.arange(0, BLOCK_N)
        is_word = lanes < num_words
        start = tl.load(starts_ptr + lanes, mask=is_word, other=0)
        last = tl.load(starts_ptr + lanes + 1, mask=is_word, other=0) - 1
        count = last - start  # of the other tokens
        matches = is_word & (count >= 0) & (count <= num_output)
        for back in range(1, tl.max(tl.where(matches, count, 0), 0) + 1):
            token = text_at(text, length - back, True)
            is_compared = matches & (back <= count)
            matches &= tl.load(tokens_ptr + last - back, mask=is_compared, other=0) == tl.where(is_compared, token, 0)
        change_bits(words_ptr, tl.load(tokens_ptr + last, mask=matches, other=-1), False, VOCAB_SIZE)


@triton.jit(do_not_specialize=["num_masks", "width", "mask_stride"])
def mask_rows_kernel(
    words_ptr, rows, limits, thinking, grammar, num_masks, width, mask_stride, VOCAB_SIZE: tl.constexpr
):
    """Write the words of one row."""
    row = tl.program_id(0).to(tl.int64)
    slot, offset = tl.load(rows.slots + row).to(tl.int64), tl.load(rows.offsets + row).to(tl.int32)
    words_ptr += row * ((VOCAB_SIZE + WORD - 1) // WORD)
    of_slot = limits.numbers + slot * VALUES
    num_allowed, num_stops, min_length = tl.load(of_slot), tl.load(of_slot + 1), tl.load(of_slot + 2)
    restores, num_words = tl.load(of_slot + 3), tl.load(of_slot + 4)
    num_prompt, budget = tl.load(of_slot + 5), tl.load(of_slot + 6)
    num_committed = tl.load(limits.text_length + slot)
    text = Text(limits.text + slot * limits.text_stride, num_committed, rows.fed + row - offset + 1)
    length, forced = num_committed + offset, tl.full([], -1, tl.int32)
    if thinking is not None:  # noqa: SIM102 (Triton compiles it away only where it stands alone)
        if budget >= 0:
            forced = forced_token(text, length, slot, budget, thinking)
    mask = grammar_of(slot, offset, grammar, num_masks, mask_stride)
    masks_ptr, width = grammar.masks + tl.maximum(mask, 0).to(tl.int64) * width, tl.where(mask < 0, 0, width)
    allowed_ptr = limits.allowed + slot * limits.allowed_stride
    begin(words_ptr, allowed_ptr, num_allowed, masks_ptr, width, forced, VOCAB_SIZE)
    if forced < 0:
        if (num_stops > 0) & (tl.load(rows.positions + row) + 1 < min_length):
            for first in range(0, num_stops, BLOCK_N):
                lanes = first + tl.arange(0, BLOCK_N)
                stops = tl.load(limits.stops + slot * limits.stops_stride + lanes, mask=lanes < num_stops, other=-1)
                change_bits(words_ptr, stops, False, VOCAB_SIZE)
            if restores != 0:
                tl.debug_barrier()
                if is_empty(words_ptr, VOCAB_SIZE):  # only stop tokens were allowed
                    begin(words_ptr, allowed_ptr, num_allowed, masks_ptr, width, forced, VOCAB_SIZE)
        if num_words > 0:
            tokens_ptr = limits.bad_tokens + slot * limits.bad_tokens_stride
            starts_ptr = limits.bad_starts + slot * limits.bad_starts_stride
            num_output = length - num_prompt
            forbid_bad_words(words_ptr, text, length, num_output, tokens_ptr, starts_ptr, num_words, VOCAB_SIZE)


def mask_rows(
    words: Tensor,
    step: StepInputs,
    limits: Limits,
    thinking: Thinking | None,
    grammar: StepGrammar | None,
    vocab_size: int,
) -> None:
    """Write the words of a step's rows, [num_rows, ceil(vocab_size / 32)] int32, contiguous.

    `thinking` is None if no request has a budget, `grammar` if none has a grammar.
    """
    rows = Rows(step.expanded_idx_mapping, step.pos, step.expanded_local_pos, step.input_ids)
    given, sizes = Grammar(limits.numbers, limits.numbers, rows.slots), (0, 0, 1)  # of the right types, not read
    if grammar is not None:
        given, sizes = Grammar(grammar.masks, grammar.mapping, grammar.requests), (*grammar.masks.shape, grammar.stride)
    mask_rows_kernel[(len(rows.slots),)](words, rows, limits, thinking, given, *sizes, VOCAB_SIZE=vocab_size)
