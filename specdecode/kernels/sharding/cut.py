"""The cutoffs of sharded rows in Triton, found without gathering them.

From the statistics of all ranks' blocks, which all know, follows the level from which on tokens are candidates (see
`truncation.narrow`). The rest takes logits, of which each rank has a part:

1. `list_kernel`: each rank lists its candidates of a row, and tells them, 8 bytes each. -> *exchange*
2. `merge_kernel` puts all ranks' candidates in one list, in the order of the vocabulary. That is the list of one GPU.
3. `cut_kernel`: so every rank finds the cutoff among them as one GPU does, and leaves the statistics of what is kept.

One GPU makes more attempts where the first does not decide, and searches the whole row if they do not. So few rows are
gathered for that, each on one rank, its *owner*:

4. `cut_kernel`: writes this rank's part of such a row to the owner's memory: if it is adjusted, in float32. -> *exchange*
5. `cut_gathered_kernel`, after `await_parts_kernel`: the owner cuts the row as one GPU does, and tells its cutoff and the
   statistics of what is kept. -> *exchange*
6. `hear_cuts_kernel`: every rank keeps these.

This takes symmetric memory: how many rows are gathered is known on the device alone. Where target rows are adjusted, they
have launches of their own, because draft rows are read in another way.
"""

import triton
import triton.language as tl

from specdecode.kernels.distribution import combine
from specdecode.kernels.launch import admit_next_launch, await_launch
from specdecode.kernels.request import given_token, load_temperature, locate
from specdecode.kernels.rows import (
    INFINITY,
    LAST_TOKEN,
    load_raw,
    row_index,
    whole_draft_row_at,
    whole_row,
    whole_target_row_at,
    with_shard,
)
from specdecode.kernels.sharding.channel import (
    ABSENT,
    awaited,
    hear,
    high_of,
    listen,
    load_step,
    low_of,
    open_line,
    start_of,
    tell,
    words_of,
)
from specdecode.kernels.sharding.offer import are_here
from specdecode.kernels.statistics import at, load_statistics, statistics_at
from specdecode.kernels.truncation.kernel import (
    ATTEMPTS,
    cut_listed,
    first_attempt,
    floor_of,
    is_to_cut,
    keep_cutoff,
    level_of,
    limits_at,
    may_decide,
    row_of_program,
    row_to_cut,
    summary_of,
    truncate_row,
)
from specdecode.kernels.truncation.narrow import (
    CANDIDATES,
    level_at,
    list_at,
    list_tokens,
    store_kept_candidates,
    token_in_order,
)
from specdecode.kernels.values import Request, Row, exists

STATE, IS_GATHERED, GIVEN, FLOOR, LEVEL, FOUND, PROGRESS = (tl.constexpr(field) for field in range(7))
"""The progress of a row: its state; whether its owner cuts it; the logit of the cutoff that came with a draft; its floor and
its level; how many candidates all ranks have found."""

DONE, IN_LIST, UNDECIDED = (tl.constexpr(state) for state in range(3))
"""A row's cutoff is known; its candidates are listed; or they would not tell."""

VECTORS = tl.constexpr(4)
"""Of 16 bytes, that a thread copies at once."""


@triton.jit
def progress_at(workspace, index):
    """Return where the progress of a row is."""
    return workspace.progress_ptr + index * PROGRESS


@triton.jit
def part_of_row(request, offset, of_draft, index, inputs, workspace, cutting, sizes):
    """Return this rank's part of a target or a draft row."""
    row, stride_token = whole_target_row_at(request, offset, inputs, sizes), inputs.target.stride_token
    if inputs.draft.ptr is not None:
        draft_row = whole_draft_row_at(request, offset, inputs, sizes)
        if not cutting.ALIKE:
            stride_token = tl.where(of_draft, draft_row.stride_token, row.stride_token)
        row = whole_row(tl.where(of_draft, draft_row.ptr, row.ptr), stride_token, request.vocab_size)
    return with_shard(row, workspace, index, sizes)


@triton.jit
def list_row(row, summary, index, line, workspace, exchange, cutting, sizes):
    """List this rank's candidates of a row, and tell them; return the row's state."""
    attempt = first_attempt(summary, sizes)
    level = level_of(attempt, summary, sizes)
    state = tl.full([], UNDECIDED, tl.int32)
    if (attempt < ATTEMPTS) & may_decide(level, summary, sizes):
        state = tl.full([], IN_LIST, tl.int32)
        list_ptr, progress_ptr = list_at(workspace, index), progress_at(workspace, index)
        block_max = tl.where(are_here(sizes), summary.block_max, -INFINITY)
        num_blocks = tl.sum((block_max >= level.logit).to(tl.int32), 0)
        found = list_tokens(level.logit, num_blocks, row, block_max, list_ptr, sizes)
        word_index, entries = index * (1 + CANDIDATES), tl.arange(0, CANDIDATES)
        tell(cutting.lists, word_index, words_of(found, found * 0), True, line, exchange)
        is_told = entries < num_told(found)
        keys = tl.load(list_ptr + CANDIDATES + entries, mask=is_told, other=0)
        token_ids = tl.load(list_ptr + 2 * CANDIDATES + entries, mask=is_told, other=0)
        tell(cutting.lists, word_index + 1 + entries, words_of(token_ids, keys), is_told, line, exchange)
        tl.store(progress_ptr + FLOOR, summary.floor)
        tl.store(progress_ptr + LEVEL, level.logit)
    return state


@triton.jit
def num_told(found):
    """Return how many of a rank's candidates it tells: none if there are too many to be listed."""
    return tl.where(found <= CANDIDATES, found, 0)


@triton.jit
def list_kernel(inputs, workspace, exchange, cutting, sizes):
    """List this rank's candidates of one row, if it is to be truncated, and tell them."""
    index = row_of_program(cutting.OF_DRAFTS, sizes)
    request, offset, of_draft, temperature, limits, is_read = row_to_cut(index, inputs, sizes)
    line = open_line(exchange)
    await_launch(exchange.OVERLAPS)
    admit_next_launch(exchange.OVERLAPS)
    is_cut = is_to_cut(request, offset, is_read, temperature, limits, workspace, sizes, cutting.POSTED)
    logit, token = -INFINITY, tl.full([], LAST_TOKEN, tl.int32)
    if inputs.drafts.cutoff_ptr is not None:
        if of_draft & is_cut:
            given, is_known = given_token(request, offset, sizes.vocab_size, inputs)
            is_cut = is_known == 0
            if given >= 0:
                logit, token = tl.load(progress_at(workspace, index) + GIVEN), given
    state = tl.full([], DONE, tl.int32)
    if is_cut:
        row = part_of_row(request, offset, of_draft, index, inputs, workspace, cutting, sizes)
        statistics = load_statistics(statistics_at(workspace.statistics_ptr, index, sizes), True, sizes)
        p = combine(statistics, row, temperature, sizes)
        logit, token = p.row_max, p.one_hot
        if token < 0:
            summary = summary_of(statistics[0], p, temperature, limits, floor_of(p.row_max, temperature, limits))
            state = list_row(row, summary, index, line, workspace, exchange, cutting, sizes)
    keep_cutoff(workspace, index, logit, token)
    tl.store(progress_at(workspace, index) + STATE, state.to(tl.float32))


@triton.jit
def merge_lists(index, step, workspace, exchange, cutting, sizes):
    """Put the candidates of a row that ranks told in one list, in the order of the vocabulary; keep how many there are."""
    list_ptr, word_index = list_at(workspace, index), index * (1 + CANDIDATES)
    lanes, entries = tl.arange(0, exchange.LANES), tl.arange(0, CANDIDATES)
    is_rank = lanes < exchange.RANKS
    ranks = tl.load(cutting.order_ptr + lanes, mask=is_rank, other=0).to(tl.int64)
    counts, counts_ptr = listen(cutting.lists, ranks, word_index, is_rank, step, exchange, tl.int64)
    found = hear(counts, counts_ptr, cutting.lists, is_rank, exchange).to(tl.int32)
    # As an id below, it is not what it should be if a rank was given up, and its words came late.
    found = tl.where(found < 0, 0, tl.where(found > CANDIDATES, CANDIDATES + 1, found))
    listed = num_told(found)
    starts = tl.cumsum(listed, 0) - listed
    for turn in range(exchange.RANKS):
        rank, start, wanted = at(ranks, turn), at(starts, turn), entries < at(listed, turn)
        told, pointers = listen(cutting.lists, rank, word_index + 1 + entries, wanted, step, exchange, tl.int64)
        words = hear(told, pointers, cutting.lists, wanted, exchange)
        is_kept, keys_ptr = wanted & (start + entries < CANDIDATES), list_ptr + CANDIDATES + start + entries
        token_ids = words.to(tl.int32)
        is_token = (token_ids >= 0) & (token_ids < sizes.vocab_size)
        tl.store(keys_ptr, (words >> 32).to(tl.int32), mask=is_kept)
        tl.store(keys_ptr + CANDIDATES, tl.where(is_token, token_ids, 0), mask=is_kept)
    tl.store(progress_at(workspace, index) + FOUND, tl.sum(found, 0).to(tl.float32))


@triton.jit
def merge_kernel(workspace, exchange, cutting, sizes):
    """Merge the lists of rows, one after the other."""
    step = load_step(exchange)
    await_launch(exchange.OVERLAPS)
    for index in range(tl.program_id(0), cutting.num_rows, tl.num_programs(0)):
        if tl.load(progress_at(workspace, index) + STATE) == IN_LIST:
            merge_lists(tl.full([], 0, tl.int64) + index, step, workspace, exchange, cutting, sizes)
    admit_next_launch(exchange.OVERLAPS)


@triton.jit
def cut_kernel(inputs, workspace, exchange, cutting, sizes):
    """Find the cutoff of one row among the candidates of all ranks; or else bring this rank's part to its owner."""
    index = row_of_program(cutting.OF_DRAFTS, sizes)
    request, offset, of_draft, temperature, limits, _is_read = row_to_cut(index, inputs, sizes)
    line = open_line(exchange)
    await_launch(exchange.OVERLAPS)
    admit_next_launch(exchange.OVERLAPS)
    progress_ptr, list_ptr = progress_at(workspace, index), list_at(workspace, index)
    state = tl.load(progress_ptr + STATE)
    found = tl.load(progress_ptr + FOUND, mask=state == IN_LIST, other=CANDIDATES + 1.0).to(tl.int32)
    is_gathered = state != DONE
    if is_gathered:
        row = part_of_row(request, offset, of_draft, index, inputs, workspace, cutting, sizes)
        if found <= CANDIDATES:
            statistics_ptr = statistics_at(workspace.statistics_ptr, index, sizes)
            statistics = load_statistics(statistics_ptr, True, sizes)
            p = combine(statistics, row, temperature, sizes)
            summary = summary_of(statistics[0], p, temperature, limits, tl.load(progress_ptr + FLOOR))
            level = level_at(tl.load(progress_ptr + LEVEL), summary.block_max)
            last, resolved, _is_few = cut_listed(list_ptr, found, level, summary, sizes)
            if resolved:
                is_gathered = tl.full([], False, tl.int1)
                logit, token = token_in_order(last)
                keep_cutoff(workspace, index, logit, token)
                store_kept_candidates(statistics_ptr, last, list_ptr, found, temperature, sizes)
        if is_gathered:
            send_part(row, request, offset, of_draft, line, exchange, cutting, sizes)
    tl.store(progress_ptr + IS_GATHERED, is_gathered.to(tl.float32))


@triton.jit
def send_part(row, request, offset, of_draft, line, exchange, cutting, sizes):
    """Write this rank's part of a row to its owner's memory, and let the owner know."""
    owner = (request.index + offset) % exchange.RANKS
    row_of_request = tl.where(of_draft, sizes.num_draft_tokens + 1 + offset, offset)
    owned = request.index // exchange.RANKS * cutting.rows_per_request + row_of_request
    dtype: tl.constexpr = tl.float32 if exists(row.adjustments) else row.ptr.dtype.element_ty
    logits_ptr = owned_row_at(tl.load(cutting.peers_ptr + owner), owned, dtype, cutting, sizes)
    WIDTH: tl.constexpr = VECTORS * 128 // dtype.primitive_bitwidth * 32 * cutting.WARPS
    for first in range(sizes.shard.start, sizes.shard.end, WIDTH):
        token_ids = first + tl.arange(0, WIDTH)
        inside, pointers = token_ids < sizes.shard.end, logits_ptr + token_ids
        if exists(row.adjustments):
            logits = load_raw(row, token_ids, True)
        else:
            logits = tl.load(row.ptr + token_ids * row.stride_token, mask=inside)
        tl.store(pointers, logits, mask=inside)
    tl.debug_barrier()  # all threads have written, before one of them says so
    word_ptr = tl.load(exchange.peers_ptr + owner).to(tl.pointer_type(tl.int64))
    word_ptr += start_of(cutting.parts, line.step, exchange) + exchange.rank * cutting.parts.length + owned
    tl.atomic_xchg(word_ptr, tl.full([], 0, tl.int64), sem="release", scope="sys")


@triton.jit
def owned_row_at(address, owned, DTYPE: tl.constexpr, cutting, sizes):
    """Return where a gathered row is, given where its owner's memory for such rows is, and its index there."""
    start = owned * cutting.row_bytes
    if cutting.OF_DRAFTS is not None:  # adjusted target rows take more
        before, num_rows = owned // cutting.rows_per_request, sizes.num_draft_tokens + 1
        before = before * num_rows + tl.minimum(owned % cutting.rows_per_request, num_rows)
        start += before * cutting.more_bytes
    return tl.multiple_of((address + start).to(tl.pointer_type(DTYPE)), 128)


@triton.jit
def owned_rows(owned, exchange, cutting, sizes):
    """Return the requests and offsets of rows that this rank owns, whether draft rows, and whether there are any."""
    row_of_request = owned % cutting.rows_per_request
    of_draft = row_of_request > sizes.num_draft_tokens
    offset = tl.where(of_draft, row_of_request - sizes.num_draft_tokens - 1, row_of_request).to(tl.int32)
    shift = (exchange.rank + exchange.RANKS - offset % exchange.RANKS) % exchange.RANKS
    request = owned.to(tl.int64) // cutting.rows_per_request * exchange.RANKS + shift
    is_row = request < sizes.batch
    if cutting.OF_DRAFTS is not None:
        is_row &= of_draft == cutting.OF_DRAFTS
    return request, offset, of_draft, is_row


@triton.jit
def index_of(request_index, offset, of_draft, sizes):
    """Return the index of a target or a draft row, given that of its request."""
    request = Request(request_index, 0, 0, 0, 0)
    return tl.where(of_draft, row_index(request, offset, True, sizes), row_index(request, offset, False, sizes))


@triton.jit
def await_parts_kernel(workspace, exchange, cutting, sizes):
    """Wait until all ranks' parts of the rows that this rank is to cut are here."""
    step, num_owned = load_step(exchange), cutting.num_owned
    await_launch(exchange.OVERLAPS)
    for first in range(tl.program_id(0) * exchange.LANES, num_owned, tl.num_programs(0) * exchange.LANES):
        owned = first + tl.arange(0, exchange.LANES)
        request_index, offset, of_draft, is_row = owned_rows(owned, exchange, cutting, sizes)
        is_row &= owned < num_owned
        progress_ptr = progress_at(workspace, index_of(request_index, offset, of_draft, sizes))
        wanted = tl.load(progress_ptr + IS_GATHERED, mask=is_row, other=0.0) == 1
        for rank in range(exchange.RANKS):
            words, pointers = listen(cutting.parts, rank, owned, wanted, step, exchange, tl.int64)
            awaited(words, pointers, wanted, exchange)
            # What was written before that word can be seen from here on.
            tl.atomic_xchg(pointers, tl.full(words.shape, ABSENT, tl.int64), mask=wanted, sem="acquire", scope="sys")
    admit_next_launch(exchange.OVERLAPS)


@triton.jit
def cut_gathered_kernel(inputs, workspace, exchange, cutting, sizes):
    """Cut one gathered row, and tell all ranks its cutoff and the statistics of what is kept."""
    owned = tl.program_id(0)
    request_index, offset, of_draft, is_row = owned_rows(owned, exchange, cutting, sizes)
    request = locate(tl.minimum(request_index, sizes.batch - 1), inputs.packing, sizes)
    index = index_of(request.index, offset, of_draft, sizes)
    temperature = load_temperature(inputs.requests, request)
    limits, _ = limits_at(request, offset, of_draft, inputs, sizes)
    line = open_line(exchange)
    await_launch(exchange.OVERLAPS)
    admit_next_launch(exchange.OVERLAPS)
    if is_row:
        if tl.load(progress_at(workspace, index) + IS_GATHERED) == 1:
            address = cutting.rows_ptr.to(tl.int64)
            dtype: tl.constexpr = tl.float32 if inputs.adjustments.EXIST else inputs.target.ptr.dtype.element_ty
            copy_of = (inputs.target.ptr,) if inputs.adjustments.EXIST else ()
            row_ptr = owned_row_at(address, owned, dtype, cutting, sizes)
            row = Row(row_ptr, 1, request.vocab_size, (), (), (), (), copy_of)
            logit, token = truncate_row(row, index, temperature, limits, workspace, sizes, cutting.WARPS)
            tl.debug_barrier()  # the statistics are read by other threads than wrote them
            statistics_ptr = statistics_at(workspace.statistics_ptr, index, sizes)
            block_max, sumexp = load_statistics(statistics_ptr, True, sizes)
            word_index, blocks = index * (1 + sizes.num_blocks), tl.arange(0, sizes.MAX_BLOCKS)
            tell(cutting.cuts, word_index, words_of(logit, token), True, line, exchange)
            is_told = blocks < sizes.num_blocks
            tell(cutting.cuts, word_index + 1 + blocks, words_of(block_max, sumexp), is_told, line, exchange)


@triton.jit
def hear_cuts_kernel(workspace, exchange, cutting, sizes):
    """Keep what owners told of the rows that they have cut, one after the other."""
    step, blocks, lanes = load_step(exchange), tl.arange(0, sizes.MAX_BLOCKS), tl.arange(0, exchange.LANES)
    await_launch(exchange.OVERLAPS)
    for row in range(tl.program_id(0), cutting.num_rows, tl.num_programs(0)):
        index = tl.full([], 0, tl.int64) + row
        if tl.load(progress_at(workspace, index) + IS_GATHERED) == 1:
            word_index, is_block = index * (1 + sizes.num_blocks), blocks < sizes.num_blocks
            first, first_ptr = listen(cutting.cuts, 0, word_index + lanes, lanes == 0, step, exchange, tl.int64)
            words, pointers = listen(cutting.cuts, 0, word_index + 1 + blocks, is_block, step, exchange, tl.int64)
            cutoff = at(hear(first, first_ptr, cutting.cuts, lanes == 0, exchange), 0)
            token = high_of(cutoff)
            token = tl.where((token >= 0) & (token < sizes.vocab_size), token, LAST_TOKEN)
            words = hear(words, pointers, cutting.cuts, is_block, exchange)
            statistics_ptr = statistics_at(workspace.statistics_ptr, index, sizes)
            tl.store(statistics_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + blocks, words, mask=is_block)
            keep_cutoff(workspace, index, low_of(cutoff), token)
    admit_next_launch(exchange.OVERLAPS)
