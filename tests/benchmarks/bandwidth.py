"""Time on a GPU: calls replayed from a graph, and how fast its memory can be read."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl

    from specdecode.kernels.arguments import Constant, Pointer
    from specdecode.kernels.launch import Plan, admit_next_launch, await_launch, can_overlap
    from specdecode.kernels.request import locate
    from specdecode.kernels.stops import STOP_BITS, add_stop_bits, are_complete, bits_at, first_row
    from specdecode.kernels.values import Place
except ImportError:  # then nothing here is called: this module is only collected
    triton = None

CALLS, REPLAYS, WARM_UP_SECONDS = 10, 15, 0.03


class Recording:
    """Calls of a function captured in one CUDA graph, and the time that one takes on the device."""

    def __init__(self, call: Callable[[], Any], calls: int = CALLS) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # the first call compiles, tunes and caches
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for _ in range(calls):
                self.output = call()  # every replay writes the output of the last call again
        self.call = call  # a graph does not keep its inputs alive
        self.calls = calls
        self.microseconds: list[float] = []
        self.warm_up()

    def warm_up(self) -> None:
        """Replay for a while: after a pause a GPU is slower at first."""
        until = time.perf_counter() + WARM_UP_SECONDS
        self.replay()
        while time.perf_counter() < until:
            self.replay()

    def replay(self) -> None:
        """Replay the graph, wait, and note the time of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.microseconds.append(1000 * start.elapsed_time(end) / self.calls)

    def settle(self) -> None:
        """Replay again, twice at most, while something disturbs the GPU: the quartiles differ by more than a tenth."""
        for _ in range(2):
            times = self.device_us()
            if times["iqr"] <= times["median"] / 10:
                return
            for _ in range(REPLAYS):
                self.replay()

    def device_us(self) -> dict[str, float]:
        """Return the median and the quartile range of the last replays."""
        return quartiles(self.microseconds[-REPLAYS:])


def median_us(call: Callable[[], Any]) -> float:
    """Return the median microseconds that one call takes on the device."""
    recording = Recording(call)
    for _ in range(REPLAYS):
        recording.replay()
    return recording.device_us()["median"]


def quartiles(values: list[float]) -> dict[str, float]:
    """Return the median and the distance of the quartiles."""
    low, median, high = torch.tensor(values, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    return {"median": round(median.item(), 3), "iqr": round((high - low).item(), 3)}


if triton is not None:

    @triton.jit
    def read_kernel(
        out_ptr,  # [programs] float32
        data_ptr,  # [programs * TILES * TILE] bfloat16
        TILE: tl.constexpr,
        TILES: tl.constexpr,
    ):
        """Reduce one contiguous chunk to its largest element."""
        chunk_ptr = data_ptr + tl.program_id(0).to(tl.int64) * (TILES * TILE) + tl.arange(0, TILE)
        largest = tl.load(chunk_ptr).to(tl.float32)
        for tile in tl.static_range(1, TILES):
            largest = tl.maximum(largest, tl.load(chunk_ptr + tile * TILE).to(tl.float32))
        tl.store(out_ptr + tl.program_id(0), tl.max(largest, 0))

    class Nothing(NamedTuple):
        """What a kernel receives that does nothing."""

        ptr: Pointer
        OVERLAPS: Constant

    @triton.jit
    def nothing_kernel(nothing):
        """Do nothing, once the launch before has ended."""
        await_launch(nothing.OVERLAPS)
        admit_next_launch(nothing.OVERLAPS)

    @triton.jit
    def reduced(values, TIMES: tl.constexpr):
        """Reduce a vector as often, each time to what depends on the last time; return the result."""
        for _ in tl.static_range(TIMES - 1):
            values = values ^ tl.max(values, 0)
        return tl.max(values, 0)

    @triton.jit
    def trips_kernel(inputs, outputs, workspace, sizes, tuning):
        """Make the trips to memory of `emit_kernel` in a small batch, each to an address that depends on the last.

        Statistics, two blocks of both rows, one of them again, the stop bits, the output. Nothing is computed but the
        largest of what came, which is then multiplied by a seed of 0. Or, if `SUMS`, as many maxima as that kernel makes
        maxima and sums at least, each of which has its threads wait for each other: of the statistics the largest, the sum
        and the top blocks; of the blocks' logits the sums, and which is best; of the last block's the first largest.
        """
        num_rows, seed = sizes.num_draft_tokens + 1, inputs.requests.first_seed
        index, offset = (tl.program_id(0) // num_rows).to(tl.int64), tl.program_id(0) % num_rows
        request = locate(index, inputs.packing, sizes)
        row = tl.minimum(offset, sizes.num_draft_tokens - 1)
        target_ptr = inputs.target.ptr + index * inputs.target.stride_request + row * inputs.target.stride_offset
        draft_ptr = inputs.draft.ptr + index * inputs.draft.stride_request + row * inputs.draft.stride_offset
        await_launch(tuning.OVERLAPS)
        blocks = tl.arange(0, sizes.MAX_BLOCKS)
        statistics_ptr = workspace.statistics_ptr + (index * num_rows + offset) * sizes.num_blocks * 2
        found = tl.load(statistics_ptr + 2 * blocks, mask=blocks < sizes.num_blocks, other=0.0)
        place = Place(request, offset, -1, (seed, index), 0.0)
        add_stop_bits(workspace.state_ptr, place, offset == sizes.num_draft_tokens, offset < 0, False)
        first = (reduced(found.to(tl.int32), 3 + tuning.TOP if tuning.SUMS else 1) * seed).to(tl.int32)
        places = first + tl.arange(0, 2)[:, None] * 1024 + tl.arange(0, 1024)[None, :]
        found = tl.maximum(tl.load(target_ptr + places), tl.load(draft_ptr + places)).to(tl.float32)
        block = (tl.max(tl.max(found, 1), 0).to(tl.int32) * seed).to(tl.int32)
        places = block * 1024 + tl.arange(0, 1024)
        found = tl.maximum(tl.load(target_ptr + places), tl.load(draft_ptr + places)).to(tl.float32)
        token = reduced(found.to(tl.int32), 2 if tuning.SUMS else 1) * seed
        bits = tl.atomic_or(bits_at(workspace.state_ptr, request), 0, sem="relaxed")
        tl.store(outputs.token_ids_ptr + tl.program_id(0), token)
        if are_complete(bits, sizes):
            tl.store(outputs.num_accepted_ptr + index, first_row(bits, STOP_BITS))

    @triton.jit
    def is_last_unpublished(count_ptr, programs):
        """Count a program in as `stops.is_last` does, but do not wait until what it wrote can be seen."""
        tl.debug_barrier()
        return tl.atomic_add(count_ptr, 1, sem="relaxed") == programs - 1


def do_nothing(launches: int) -> Callable[[], list[torch.Tensor]]:
    """Return a function that allocates what a verification step of one request does, and launches kernels without work."""
    device = torch.device("cuda", torch.cuda.current_device())
    plan = Plan(device, {"workspace": (torch.int32, 8192)}, zeros=0)
    for launch in range(launches):
        nothing = Nothing(plan.part("workspace"), can_overlap(device))
        plan.add(nothing_kernel, 1, (nothing,), num_warps=4, follows=launch > 0)

    def call() -> list[torch.Tensor]:
        output = [
            torch.empty(1, 4, dtype=torch.int64, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
            torch.empty(1, dtype=torch.bool, device=device),
        ]
        plan.run({}, {})
        return output

    return call


def read_bandwidth(elements: int = 2**30) -> float:
    """Return the most bytes per second that a kernel read which does little else, of a multiple of 65,536 elements."""
    data = torch.empty(elements, dtype=torch.bfloat16, device="cuda").normal_()
    largest, times = data.max(), []
    for tile, warps in ((2048, 4), (4096, 4), (8192, 8)):
        for tiles in (1, 2, 4, 8):
            programs = elements // (tiles * tile)
            out = torch.full((programs,), float("nan"), device="cuda")

            def read(out=out, tile=tile, tiles=tiles, warps=warps):
                read_kernel[(len(out),)](out, data, TILE=tile, TILES=tiles, num_warps=warps)

            times.append(median_us(read))
            assert out.max() == largest
    return data.nbytes / min(times) * 1e6
