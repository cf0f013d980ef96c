"""Shards in Triton: what a step does besides where each rank holds the logits of a part of the vocabulary.

Ranks tell each other the statistics of their blocks, 8 bytes for 1,024 logits, and few single logits. From then on all have
the workspace that one GPU has after reading, bit for bit, and the functions of the other rooms decide from it as they do
there. What is left is to draw a token, which takes logits of a block that one rank has:

1. `note_kernel`, after the launch that reads: makes this rank's statistics finite; notes the first largest token of a row
   that may be a point mass, and the logits of tokens that matter. -> *exchange* of statistics and notes
2. `arrange_kernel`: puts all statistics in the order of the vocabulary, and with each row what is known of its tokens.
3. `offer_kernel`: decides about a row and draws its token from this rank's blocks alone. The token is an *offer*, with the
   score of its block. -> *exchange* of offers, 8 bytes a row
4. `finish_kernel`: takes the offer of the best score, which is the block that one GPU selects, and writes the output.

In block verification `ratio_kernel` and `decide_kernel` follow 2; `sum_shard_kernel` sums this rank's blocks of the listed
residuals. -> *exchange* of these sums; then `arrange_sums_kernel`, and 3. All that is exchanged but offers is in
`exchange`. No kernel waits for another rank.
"""

import triton
import triton.language as tl

from specdecode.kernels.block import settle
from specdecode.kernels.distribution import combine, relative_sums
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.logprobs import load_raw_statistics, logprob_asked, normalizer_asked, normalizer_of
from specdecode.kernels.packed import locate, locate_program
from specdecode.kernels.philox import load_key
from specdecode.kernels.probabilistic import (
    ALL,
    NONE,
    ROW,
    load_both,
    load_residual_sums,
    residual_sums,
    sums_without,
)
from specdecode.kernels.rows import (
    BLOCK_SIZE,
    INFINITY,
    LAST_TOKEN,
    draft_row_at,
    load_temperature,
    row_index,
    target_row_at,
)
from specdecode.kernels.selection import block_scores, noise_at
from specdecode.kernels.state import (
    count_drafts,
    load_draft_ids,
    store_logprob,
    store_output,
    store_token,
)
from specdecode.kernels.statistics import load_statistics, target_statistics
from specdecode.kernels.synthetic import is_scheduled
from specdecode.kernels.values import Distribution, Normalizer, Place, Residual

IS_ACCEPTED, IS_EMPTY = tl.constexpr(1), tl.constexpr(2)
"""The bits of a verdict: the draft is accepted; the row has no finite logit."""

RESIDUAL_BIT, SCORE_BITS = tl.constexpr(1 << 62), tl.constexpr(31)
"""An offer: whether its token is of a residual, the block's score, and LAST_TOKEN less the token. The largest wins."""


# ---- 3. the token that this rank offers


@triton.jit
def decide_sample(place, noise, inputs, workspace, sizes):
    """Return what `strict.decide` does, but in place of the token what it is drawn from: p, less nothing."""
    row = target_row_at(place.request, place.offset, inputs, workspace, sizes)
    statistics = load_statistics(target_statistics(workspace, place.request, place.offset, sizes), True, sizes)
    p = combine(statistics, row, place.temperature, sizes)
    accepted = tl.full([], False, tl.int1)
    if inputs.drafts.rates_ptr is not None:
        accepted = is_scheduled(place, noise.uniform, inputs.drafts)
    return accepted, normalizer_of(p), (p, Residual(p.row_max, 0.0, 0.0, tl.full([], NONE, tl.int32)))


@triton.jit
def decide_sample_here(place, noise, inputs, workspace, sizes):
    """Return what `decide_sample` does, of this rank's blocks alone, whose statistics do not travel (`Exchange.maxima_ptr`).

    What blocks and tokens are compared by depends on nothing of other blocks but the row's maximum.
    """
    row = target_row_at(place.request, place.offset, inputs, workspace, sizes)
    index = row_index(place.request, place.offset, False, sizes) * sizes.shard.most_blocks
    blocks = tl.arange(0, sizes.MAX_BLOCKS) - sizes.shard.start // BLOCK_SIZE
    pointers = workspace.statistics_ptr + (index + blocks) * 2
    block_max = tl.load(pointers, mask=are_here(sizes), other=-INFINITY)
    sumexp = tl.load(pointers + 1, mask=are_here(sizes), other=0.0)
    is_point = (place.temperature == 0) | (tl.abs(row.row_max) == INFINITY)
    finite = tl.where(is_point, 0.0, row.row_max)
    block_sums = relative_sums(finite, (block_max, tl.where(is_point, 0.0, sumexp)), place.temperature)
    p = Distribution(row.row_max, 1.0, tl.where(is_point, row.first, -1), block_sums)
    accepted = tl.full([], False, tl.int1)
    if inputs.drafts.rates_ptr is not None:
        accepted = is_scheduled(place, noise.uniform, inputs.drafts)
    normalizer = Normalizer(row.row_max, 0.0, p.one_hot)
    return accepted, normalizer, (p, Residual(row.row_max, 0.0, 0.0, tl.full([], NONE, tl.int32)))


@triton.jit
def are_here(sizes):
    """Return which blocks this rank has, [MAX_BLOCKS]."""
    first = tl.arange(0, sizes.MAX_BLOCKS) * BLOCK_SIZE
    return (first >= sizes.shard.start) & (first < sizes.shard.end)


@triton.jit
def only_here(p, sizes):
    """Return a distribution with the sums of this rank's blocks alone."""
    return Distribution(p.row_max, p.sumexp, p.one_hot, tl.where(are_here(sizes), p.block_sums, 0.0))


@triton.jit
def residual_sums_here(place, block, p, residual, inputs, workspace, sizes, tuning):
    """Return the residual's sums of this rank's blocks, so far as a token of a block is drawn by them; zeros elsewhere."""
    row = target_row_at(place.request, place.offset, inputs, workspace, sizes)
    sums = tl.zeros([sizes.MAX_BLOCKS], tl.float32)
    if residual.subtracted >= 0:
        sums = sums_without(residual.subtracted, p, row, place.temperature, sizes)
    if inputs.draft.ptr is not None:
        if residual.subtracted <= ROW:
            if tuning.SUMMED == ALL:
                sums = load_residual_sums(workspace, place.request, place.offset, sizes)
            else:  # of this block alone: no other of this rank's has a better score
                draft_row = draft_row_at(place.request, place.offset, inputs, workspace, sizes)
                target, draft = load_both(inputs, row, draft_row, block + tl.arange(0, 1), tuning.LANES)
                its_sum = tl.sum(residual_sums(target, draft, residual, place.temperature), 0)
                sums = tl.where(tl.arange(0, sizes.MAX_BLOCKS) == block, its_sum, 0.0)
    return sums


@triton.jit
def offer(place, noise, source, inputs, workspace, sizes, tuning):
    """Return the token that this rank would emit at a place, and its offer: 0 if all of the row is another rank's.

    A residual that is found on any rank comes before p, from which the token is drawn if there is none. Then the score
    decides, and of equal ones the first block: so does `recover` among the blocks of one GPU.
    """
    p, residual = source
    p = only_here(p, sizes)
    token = tuning.DRAW(place, noise, (p, residual), inputs, workspace, sizes, tuning).to(tl.int32)
    block = token // BLOCK_SIZE
    sums = residual_sums_here(place, block, p, residual, inputs, workspace, sizes, tuning)
    has_residual = tl.max(sums, 0) > 0
    scores = block_scores(tl.where(has_residual, sums, p.block_sums), noise.exponentials)
    score = tl.max(tl.where(tl.arange(0, sizes.MAX_BLOCKS) == block, scores, 0.0), 0)
    number = (score.to(tl.int32, bitcast=True).to(tl.int64) << SCORE_BITS) | (token ^ LAST_TOKEN)
    number = tl.where(has_residual, number | RESIDUAL_BIT, number)
    is_here = (token >= sizes.shard.start) & (token < sizes.shard.end) & (score > 0)
    one_hot = (token ^ LAST_TOKEN).to(tl.int64)  # which all ranks know
    return token, tl.where(p.one_hot >= 0, one_hot, tl.where(is_here, number, 0))


@triton.jit
def offer_row(place, outputs, inputs, workspace, sizes, tuning):
    """Return the verdict on the draft at a place, this rank's offer of a token, and that token's log-probability."""
    noise = noise_at(place, inputs.requests, sizes)
    raw = load_raw_statistics(place, workspace, sizes)
    accepted, p, source = tuning.DECIDE(place, noise, inputs, workspace, sizes)
    verdict = tl.where(p.row_max == -INFINITY, IS_EMPTY, 0)
    if not tuning.SETTLES:
        verdict = tl.where(accepted, verdict | IS_ACCEPTED, verdict)
    if outputs.logsumexp_ptr is not None:
        logsumexp = tl.where(place.temperature > 0, p.row_max / place.temperature + p.log_sum, 0.0)
        tl.store(outputs.logsumexp_ptr + place.request.index, logsumexp)
    number, logprob = tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float32)
    asked = p
    if outputs.logprobs_ptr is not None:
        asked = normalizer_asked(place, p, raw, inputs, workspace, sizes)
        if tuning.PER_ROW:
            if place.token >= 0:  # for the case that it is emitted
                logprob = logprob_asked(place, place.token, asked, inputs, workspace, sizes)
                store_logprob(outputs, place, logprob, sizes)
    if (verdict & IS_ACCEPTED) == 0:
        token, number = offer(place, noise, source, inputs, workspace, sizes, tuning)
        if outputs.logprobs_ptr is not None:
            logprob = logprob_asked(place, token, asked, inputs, workspace, sizes)
    return verdict, number, logprob


@triton.jit
def store_offers(request, offsets, wanted, verdicts, numbers, logprob, exchange, sizes):
    """Store the verdicts and offers of some rows of a request."""
    index = row_index(request, offsets, False, sizes)
    tl.store(exchange.verdicts_ptr + index, verdicts, mask=wanted)
    tl.store(exchange.offers_ptr + index * exchange.OFFERS, numbers, mask=wanted)
    if exchange.OFFERS == 2:
        bits = (numbers * 0) + logprob.to(tl.int32, bitcast=True)
        tl.store(exchange.offers_ptr + index * exchange.OFFERS + 1, bits, mask=wanted)


@triton.jit
def offer_kernel(inputs, outputs, workspace, exchange, sizes, tuning):
    """Decide about one row, or in block verification about a request, and offer a token."""
    programs = 1
    if tuning.PER_ROW:
        programs = sizes.num_draft_tokens + 1
    request, offset = locate_program(programs, inputs.packing, sizes)
    temperature, key = load_temperature(inputs.requests, request), load_key(inputs.requests, request)
    num_drafts, token = tl.full([], 0, tl.int32), tl.full([], -1, tl.int32)
    if inputs.drafts.ids_ptr is not None:
        num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    admit_next_launch(tuning.OVERLAPS)
    await_launch(tuning.OVERLAPS)
    if tuning.SETTLES:
        offset, was_empty = settle(request, num_drafts, inputs, workspace, sizes)
    verdict, number = tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    logprob = tl.full([], 0.0, tl.float32)
    if offset <= num_drafts:
        if inputs.drafts.ids_ptr is not None:
            token = load_draft_ids(inputs.drafts, request, offset, sizes)
        place = Place(request, offset, token, key, temperature)
        verdict, number, logprob = offer_row(place, outputs, inputs, workspace, sizes, tuning)
    if tuning.SETTLES:
        offsets = tl.arange(0, sizes.MAX_DRAFTS)
        verdict = tl.where(was_empty, IS_EMPTY, verdict)
        verdicts = tl.where(offsets < offset, IS_ACCEPTED, tl.where(offsets == offset, verdict, 0))
        numbers = tl.where(offsets == offset, number, 0)
        wanted = offsets <= sizes.num_draft_tokens
        store_offers(request, offsets, wanted, verdicts, numbers, logprob, exchange, sizes)
    else:
        store_offers(request, offset, offset >= 0, verdict, number, logprob, exchange, sizes)


# ---- 4. the best offer


@triton.jit
def best_offers(request, offsets, wanted, exchange, sizes):
    """Return the best offer at each of some rows, and the log-probability that came with it."""
    index = row_index(request, offsets, False, sizes)
    best, logprobs = tl.zeros_like(index), index.to(tl.float32)
    for rank in range(exchange.ranks):
        pointer = exchange.received_ptr + rank * exchange.length + index * exchange.OFFERS
        numbers = tl.load(pointer, mask=wanted, other=0)
        is_better = numbers > best
        if exchange.OFFERS == 2:
            theirs = tl.load(pointer + 1, mask=wanted, other=0).to(tl.int32).to(tl.float32, bitcast=True)
            # Of a point mass all ranks offer the one token, but only the rank that has it knows its logit.
            is_better |= (numbers == best) & (theirs > logprobs)
            logprobs = tl.where(is_better, theirs, logprobs)
        best = tl.where(is_better, numbers, best)
    return best, logprobs


@triton.jit
def finish_kernel(inputs, outputs, exchange, sizes):
    """Write the output of one request."""
    request = locate(tl.program_id(0).to(tl.int64), inputs.packing, sizes)
    offsets = tl.arange(0, sizes.MAX_DRAFTS)
    wanted = offsets <= sizes.num_draft_tokens
    num_drafts = tl.full([], 0, tl.int32)
    if inputs.drafts.ids_ptr is not None:
        counted = count_drafts(inputs.drafts, request, sizes)
        num_drafts, _ = counted
        drafts = load_draft_ids(inputs.drafts, request, offsets, sizes)
    await_launch(exchange.OVERLAPS)
    best, logprobs = best_offers(request, offsets, wanted, exchange, sizes)
    tokens = ((best & LAST_TOKEN) ^ LAST_TOKEN).to(tl.int32)
    index = row_index(request, offsets, False, sizes)
    verdicts = tl.load(exchange.verdicts_ptr + index, mask=wanted, other=0)
    is_accepted = (verdicts & IS_ACCEPTED) > 0
    if exchange.MATCHES:
        is_accepted = tokens == drafts
    stop = tl.min(tl.where((offsets < num_drafts) & is_accepted, sizes.num_draft_tokens, offsets), 0)
    is_empty = tl.max(tl.where((offsets <= stop) & ((verdicts & IS_EMPTY) > 0), 1, 0), 0) == 1
    token = tl.sum(tl.where(offsets == stop, tokens, 0), 0).to(tl.int64)
    logprob = tl.sum(tl.where(offsets == stop, logprobs, 0.0), 0)
    if inputs.drafts.ids_ptr is not None:
        store_token(outputs, Place(request, stop, -1, (0, 0), 0.0), token, logprob, sizes)
        store_output(outputs, inputs.drafts, counted, request, stop, is_empty, sizes)
    else:
        tl.store(outputs.token_ids_ptr + request.index, token)
        if outputs.logprobs_ptr is not None:
            tl.store(outputs.logprobs_ptr + request.index, logprob)
        if outputs.num_accepted_ptr is not None:
            tl.store(outputs.num_accepted_ptr + request.index, 0)
            tl.store(outputs.num_drafts_ptr + request.index, 0)
            tl.store(outputs.invalid_ptr + request.index, is_empty)
