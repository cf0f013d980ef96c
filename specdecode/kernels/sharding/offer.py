"""Shards in Triton: what a step does besides where each rank holds the logits of a part of the vocabulary.

Ranks tell each other the statistics of their blocks, 8 bytes for 1,024 logits, and few single logits. From then on all have
the workspace that one GPU has after reading, bit for bit, and the functions of the other modules decide from it as they do
there. (Where a token is only drawn, as in greedy and `strict` steps, ranks tell a row's maximum alone.) What is left is to
draw a token, which takes logits of a block that one rank has:

1. `tell_kernel`, after the launch that reads: tells the statistics of this rank's blocks, the first largest token of a row
   that may be a point mass, and the logits of tokens that matter. -> *exchange*
2. `arrange_kernel`: puts all statistics in the order of the vocabulary, and with each row what is known of its tokens. In a
   large batch it also decides, as `read` does on one GPU, so that only the rows are drawn from at which requests stop.
3. `offer_kernel`: decides about a row, if that has not been done, and draws its token from this rank's blocks alone. The
   token is an *offer*, with the score of its block. -> *exchange* of offers, 8 bytes each
4. `finish_kernel`: takes the offer of the best score, which is the block that one GPU selects, and writes the output.

If rows are truncated, the launches of `cut` come before 3. In block verification `ratio_kernel` and `decide_kernel`
follow 2; `sum_shard_kernel` sums this rank's blocks of the listed residuals. -> *exchange* of these sums; then
`arrange_sums_kernel`, and 3. What precedes offers is in `tell` and `arrange`.
"""

import triton
import triton.language as tl

from specdecode.kernels.block import stop_of
from specdecode.kernels.distribution import relative_sums, target_distribution
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.logprobs import load_raw_statistics, logprob_asked, normalizer_asked, normalizer_of
from specdecode.kernels.output import store_logprob, store_normalizer, store_output, store_sample, store_token
from specdecode.kernels.probabilistic import recover
from specdecode.kernels.request import (
    count_drafts,
    load_draft_ids,
    load_key,
    load_temperature,
    locate,
    locate_program,
    with_draft,
)
from specdecode.kernels.residual import NONE
from specdecode.kernels.rows import BLOCK_SIZE, INFINITY, LAST_TOKEN, row_index, target_row_at
from specdecode.kernels.selection import noise_at
from specdecode.kernels.sharding.channel import FAILED, NEXT_STEP, STEP, hear, listen, low_of, open_line, tell, words_of
from specdecode.kernels.sharding.rivals import rivals_of
from specdecode.kernels.statistics import at
from specdecode.kernels.stops import is_surely_accepted, load_stop
from specdecode.kernels.synthetic import is_scheduled
from specdecode.kernels.values import Distribution, Normalizer, Place, Residual

IS_EMPTY, IS_ACCEPTED, COUNT_BIT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(1)
"""The bits of a verdict: the row, or one before it, has no finite logit; and that the draft is accepted. Where a verdict is
on a request, there is the count of drafts that are accepted instead, from `COUNT_BIT` on."""

RESIDUAL_BIT, SCORE_BITS = tl.constexpr(1 << 62), tl.constexpr(31)
"""An offer: whether its token is of a residual, the block's score, and LAST_TOKEN less the token. The largest wins."""


# ---- 3. the token that this rank offers


@triton.jit
def decide_sample(place, noise, inputs, workspace, sizes):
    """Return what `strict.decide` does, but instead of the token what it is drawn from: p, less nothing."""
    _, p = target_distribution(place, inputs, workspace, sizes)
    return undrawn(place, noise, p, normalizer_of(p), inputs)


@triton.jit
def undrawn(place, noise, p, normalizer, inputs):
    """Return whether a schedule accepts the draft at a place, the normalizer, and what is drawn from: p, less nothing."""
    accepted = tl.full([], False, tl.int1)
    if inputs.drafts.rates_ptr is not None:
        accepted = is_scheduled(place, noise.uniform, inputs.drafts)
    return accepted, normalizer, (p, Residual(p.row_max, 0.0, 0.0, tl.full([], NONE, tl.int32)))


@triton.jit
def decide_sample_here(place, noise, inputs, workspace, sizes):
    """Return what `decide_sample` does, of this rank's blocks alone, whose statistics do not travel (`Exchange.MAXIMA`).

    What blocks and tokens are compared by depends on nothing of other blocks but the row's maximum.
    """
    shard = target_row_at(place, inputs, workspace, sizes).shard
    row_max, index = shard.row_max, row_index(place.request, place.offset, False, sizes) * sizes.shard.most_blocks
    blocks = tl.arange(0, sizes.MAX_BLOCKS) - sizes.shard.start // BLOCK_SIZE
    pointers = workspace.statistics_ptr + (index + blocks) * 2
    block_max = tl.load(pointers, mask=are_here(sizes), other=-INFINITY)
    sumexp = tl.load(pointers + 1, mask=are_here(sizes), other=0.0)
    is_point = (place.temperature == 0) | (tl.abs(row_max) == INFINITY)
    finite = tl.where(is_point, 0.0, row_max)
    block_sums = relative_sums(finite, (block_max, tl.where(is_point, 0.0, sumexp)), place.temperature)
    p = Distribution(row_max, 1.0, tl.where(is_point, shard.first, -1), block_sums)
    return undrawn(place, noise, p, Normalizer(row_max, 0.0, p.one_hot), inputs)


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
def offer(place, noise, source, rivals, inputs, workspace, sizes, tuning):
    """Return the token that this rank would emit at a place, and its offer: 0 if all of the row is another rank's.

    A residual that is found on any rank comes before p, from which the token is drawn if there is none. Then the score
    decides, and of equal ones the first block: so does `recover` among the blocks of one GPU.
    """
    p, residual = source
    here = only_here(p, sizes), residual
    token, score, has_residual = recover(place, noise.exponentials, here, rivals, inputs, workspace, sizes, tuning)
    token = token.to(tl.int32)
    offered = (score.to(tl.int64) << SCORE_BITS) | (token ^ LAST_TOKEN)
    offered = tl.where(has_residual, offered | RESIDUAL_BIT, offered)
    is_here = (token >= sizes.shard.start) & (token < sizes.shard.end) & (score > 0)
    one_hot = (token ^ LAST_TOKEN).to(tl.int64)  # which all ranks know
    return token, tl.where(p.one_hot >= 0, one_hot, tl.where(is_here, offered, 0))


@triton.jit
def offer_row(place, noise, rivals, outputs, inputs, workspace, sizes, tuning):
    """Return whether the draft at a place is accepted, and its row empty; this rank's offer, and its log-probability."""
    raw = load_raw_statistics(place, inputs, workspace, sizes)
    accepted, normalizer, source = tuning.DECIDE(place, noise, inputs, workspace, sizes)
    if tuning.POSTED:
        accepted &= place.offset < load_stop(workspace.state_ptr, place.request, sizes)
    store_normalizer(outputs, place, normalizer, workspace)
    offered, logprob = tl.full([], 0, tl.int64), tl.full([], 0.0, tl.float32)
    asked = normalizer
    if outputs.logprobs_ptr is not None:
        asked = normalizer_asked(place, normalizer, raw, inputs, workspace, sizes)
        if tuning.PER_ROW:
            if place.token >= 0:  # for the case that it is emitted
                logprob = logprob_asked(place, place.token, asked, inputs, workspace, sizes)
                store_logprob(outputs, place, logprob, sizes)
    if (accepted == 0) | (not tuning.PER_ROW):
        token, offered = offer(place, noise, source, rivals, inputs, workspace, sizes, tuning)
        if outputs.logprobs_ptr is not None:
            logprob = logprob_asked(place, token, asked, inputs, workspace, sizes)
    return accepted, normalizer.row_max == -INFINITY, offered, logprob


@triton.jit
def tell_offer(index, verdict, offered, logprob, line, exchange):
    """Tell an offer, of a row or of a request; keep the verdict, at which all ranks arrive."""
    tl.store(exchange.verdicts_ptr + index, verdict)
    tell(exchange.offers, index * exchange.OFFERS, offered, True, line, exchange)
    if exchange.OFFERS == 2:
        word = words_of(logprob, tl.full([], 0, tl.int32))
        tell(exchange.offers, index * exchange.OFFERS + 1, word, True, line, exchange)


@triton.jit
def offer_kernel(inputs, outputs, workspace, exchange, sizes, tuning):
    """Decide about one row, or take a request's row at which it stops, and offer a token."""
    programs = 1
    if tuning.PER_ROW:
        programs = sizes.num_draft_tokens + 1
    request, offset = locate_program(programs, inputs.packing, sizes)
    index = request.index
    if tuning.PER_ROW:
        index = row_index(request, offset, False, sizes)
    place = Place(request, offset, -1, load_key(inputs.requests, request), load_temperature(inputs.requests, request))
    num_drafts, _ = count_drafts(inputs.drafts, request, sizes)
    if tuning.PER_ROW:
        noise = noise_at(place, inputs.requests, sizes)
    line, is_empty = open_line(exchange), tl.full([], False, tl.int1)
    await_launch(tuning.OVERLAPS)
    admit_next_launch(tuning.OVERLAPS)
    if not tuning.PER_ROW:
        offset, is_empty = stop_of(request, num_drafts, inputs, workspace, sizes, tuning)
        place = with_draft(place, offset, -1)
        noise = noise_at(place, inputs.requests, sizes)
    accepted, offered = tl.full([], False, tl.int1), tl.full([], 0, tl.int64)
    logprob = tl.full([], 0.0, tl.float32)
    matters = offset <= num_drafts
    if tuning.POSTED:
        matters &= offset <= load_stop(workspace.state_ptr, request, sizes)
        if outputs.logprobs_ptr is None:  # they are of what truncation leaves
            accepted = matters & is_surely_accepted(workspace.state_ptr, request, offset, sizes)
            matters &= accepted == 0
    if matters:
        drafted = with_draft(place, offset, load_draft_ids(inputs.drafts, request, offset, sizes))
        rivals = rivals_of(index, line, exchange)
        accepted, row_is_empty, offered, logprob = offer_row(
            drafted, noise, rivals, outputs, inputs, workspace, sizes, tuning
        )
        is_empty |= row_is_empty
    verdict = tl.where(is_empty, IS_EMPTY, 0)
    if tuning.PER_ROW:
        tell_offer(index, tl.where(accepted, verdict | IS_ACCEPTED, verdict), offered, logprob, line, exchange)
    else:
        tell_offer(index, verdict | (offset << COUNT_BIT), offered, logprob, line, exchange)


# ---- 4. the best offer


@triton.jit
def best_offers(index, wanted, step, exchange):
    """Return the best of the ranks' offers at each of some indices, and the log-probability that came with it."""
    best, logprobs = tl.zeros_like(index), (index * 0).to(tl.float32)
    for rank in range(exchange.RANKS):
        words, pointers = listen(exchange.offers, rank, index * exchange.OFFERS, wanted, step, exchange, tl.int64)
        offered = hear(words, pointers, exchange.offers, wanted, exchange)
        is_better = offered > best
        if exchange.OFFERS == 2:
            words, pointers = listen(
                exchange.offers, rank, index * exchange.OFFERS + 1, wanted, step, exchange, tl.int64
            )
            their_logprobs = low_of(hear(words, pointers, exchange.offers, wanted, exchange))
            # Of a point mass all ranks offer the one token, but only the rank that has it knows its logit.
            is_better |= (offered == best) & (their_logprobs > logprobs)
            logprobs = tl.where(is_better, their_logprobs, logprobs)
        best = tl.where(is_better, offered, best)
    return best, logprobs


@triton.jit
def emitted_of_rows(request, drafts, num_drafts, step, exchange, sizes):
    """Return where a request stops, whether it is invalid, and the offer there, given an offer for each of its rows."""
    offsets = tl.arange(0, sizes.MAX_DRAFTS)
    wanted, index = offsets <= sizes.num_draft_tokens, row_index(request, offsets, False, sizes)
    best, logprobs = best_offers(index, wanted, step, exchange)
    verdicts = tl.load(exchange.verdicts_ptr + index, mask=wanted, other=0)
    is_accepted = (verdicts & IS_ACCEPTED) > 0
    if exchange.MATCHES:
        is_accepted = token_offered(best) == drafts
    stop = tl.min(tl.where((offsets < num_drafts) & is_accepted, sizes.num_draft_tokens, offsets), 0)
    is_empty = tl.max(tl.where((offsets <= stop) & ((verdicts & IS_EMPTY) > 0), 1, 0), 0) == 1
    is_stop = offsets == stop
    return stop, is_empty, tl.sum(tl.where(is_stop, best, 0), 0), tl.sum(tl.where(is_stop, logprobs, 0.0), 0)


@triton.jit
def emitted_of_request(request, step, exchange):
    """Return that, given one offer for the request."""
    lanes = tl.arange(0, exchange.LANES)  # as many as threads, of which one listens
    best, logprobs = best_offers(request.index + lanes, lanes == 0, step, exchange)
    verdict = tl.load(exchange.verdicts_ptr + request.index)
    return verdict >> COUNT_BIT, (verdict & IS_EMPTY) > 0, at(best, 0), at(logprobs, 0)


@triton.jit
def token_offered(offered):
    """Return the token of an offer; 0 has none."""
    return ((offered & LAST_TOKEN) ^ LAST_TOKEN).to(tl.int32)


@triton.jit
def finish(request, step, inputs, outputs, exchange, sizes):
    """Write the output of one request."""
    counted = count_drafts(inputs.drafts, request, sizes)
    drafts = load_draft_ids(inputs.drafts, request, tl.arange(0, sizes.MAX_DRAFTS), sizes)
    if exchange.PER_ROW:
        stop, is_empty, offered, logprob = emitted_of_rows(request, drafts, counted[0], step, exchange, sizes)
    else:
        stop, is_empty, offered, logprob = emitted_of_request(request, step, exchange)
    if exchange.peers_ptr is not None:  # what is heard once a rank did not answer in time may be no token
        offered = tl.where(tl.load(exchange.memory_ptr + FAILED) == 1, 0, offered)
    is_empty |= offered == 0  # no rank has offered anything: one did not answer in time
    token, place = tl.where(offered == 0, 0, token_offered(offered)).to(tl.int64), Place(request, stop, -1, (0, 0), 0.0)
    if inputs.drafts.ids_ptr is not None:
        store_token(outputs, place, token, logprob, sizes)
        store_output(outputs, inputs.drafts, counted, request, stop, is_empty, sizes)
    else:
        store_sample(outputs, place, token, logprob, is_empty, sizes)


@triton.jit
def finish_kernel(inputs, outputs, exchange, sizes):
    """Write the output of requests, one after the other; then the step is over."""
    await_launch(exchange.OVERLAPS)
    step = tl.full([], 0, tl.int64)
    if exchange.peers_ptr is not None:
        next_step = tl.load(exchange.memory_ptr + NEXT_STEP)
        step = next_step - 1
        if tl.program_id(0) == 0:
            tl.store(exchange.memory_ptr + STEP, next_step)
    for index in range(tl.program_id(0), sizes.batch, tl.num_programs(0)):
        request = locate(tl.full([], 0, tl.int64) + index, inputs.packing, sizes)
        finish(request, step, inputs, outputs, exchange, sizes)
