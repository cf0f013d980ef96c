"""Time on a GPU: calls replayed from a graph, and the read bandwidth of its memory."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

try:
    import triton
    import triton.language as tl

    from specdecode.kernels.arguments import Constant, Pointer
    from specdecode.kernels.launch import Part, Plan, admit_next_launch, await_launch, can_overlap
except ImportError:  # without Triton this module is only collected
    triton = None

CALLS, REPLAYS, WARM_UP_SECONDS = 10, 15, 0.03


class Recording:
    """Calls of a function captured in one CUDA graph, and the time of one call on the device."""

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
        """Replay for a while: after a pause a GPU is slow at first."""
        until = time.perf_counter() + WARM_UP_SECONDS
        self.replay()
        while time.perf_counter() < until:
            self.replay()

    def replay(self) -> None:
        """Replay the graph, wait, and record the time of one call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        self.microseconds.append(1000 * start.elapsed_time(end) / self.calls)

    def settle(self) -> None:
        """Replay again, at most twice, while the quartiles differ by more than a tenth, a sign of disturbance."""
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
    """Return the median microseconds of one call on the device."""
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
        """The arguments of a kernel without work."""

        ptr: Pointer
        OVERLAPS: Constant

    @triton.jit
    def nothing_kernel(nothing):
        """Do nothing, after the previous launch has ended."""
        await_launch(nothing.OVERLAPS)
        admit_next_launch(nothing.OVERLAPS)

    @triton.jit
    def is_last_unpublished(count_ptr, programs):
        """Count a program like `first_rejected.is_last`, but without waiting until its writes are visible."""
        tl.debug_barrier()
        return tl.atomic_add(count_ptr, 1, sem="relaxed") == programs - 1


def do_nothing(launches: int) -> Callable[[], list[torch.Tensor]]:
    """Return a function that allocates the memory of a step of one request, and launches kernels without work."""
    device = torch.device("cuda", torch.cuda.current_device())
    plan = Plan(device, {}, {"memory": Part(torch.int32, "8192")})
    for launch in range(launches):
        nothing = Nothing(plan.part("memory"), can_overlap(device))
        plan.add(nothing_kernel, "1", (nothing,), num_warps=4, follows=launch > 0)

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
    """Return the largest read bandwidth of a reduction kernel, in bytes per second, over a multiple of 65,536 elements."""
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
