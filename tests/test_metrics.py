"""Acceptance statistics: the counts against plain Python, the printed block, and updates that do not synchronise."""

import copy
import math
import pickle
import random
import sys
import threading

import pytest
import torch

from specdecode import AcceptanceSchedule, AcceptanceStats, RejectionSampler, SamplerOutput


def make_output(
    accepted: list[int], drafted: list[int] | None = None, width: int = 3, device: str = "cpu"
) -> SamplerOutput:
    """Return the `SamplerOutput` of these accepted and drafted tokens per request, with `width` slots for drafts."""
    token_ids = [[7] * (count + 1) + [-1] * (width - count) for count in accepted]
    return SamplerOutput(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device).reshape(len(accepted), width + 1),
        num_accepted=torch.tensor(accepted, dtype=torch.int32, device=device),
        num_draft_tokens=torch.tensor(drafted or [width] * len(accepted), dtype=torch.int32, device=device),
        invalid=torch.zeros(len(accepted), dtype=torch.bool, device=device),
    )


def assert_counts(stats: AcceptanceStats, steps: list[tuple[int, int]]) -> None:
    """Assert that the statistics count these (accepted, drafted) pairs, one per request and step."""
    steps = [(accepted, drafted) for accepted, drafted in steps if drafted > 0]
    accepted = [accepted for accepted, _ in steps]
    assert stats.drafts == len(steps)
    assert stats.draft_tokens == sum(drafted for _, drafted in steps)
    assert stats.accepted_tokens == sum(accepted)
    assert stats.acceptance_rate == sum(accepted) / sum(drafted for _, drafted in steps)
    assert stats.acceptance_length == pytest.approx(sum(count + 1 for count in accepted) / len(steps))
    assert stats.per_position == [
        sum(count > i for count in accepted) / len(steps) for i in range(stats.num_draft_tokens)
    ]


def random_steps(seed: int, batch: int, width: int) -> list[tuple[int, int]]:
    generator = random.Random(seed)
    drafted = [generator.randint(0, width) for _ in range(batch)]
    return [(generator.randint(0, count), count) for count in drafted]


@pytest.mark.parametrize("width", [1, 3, 5])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_counts_are_exact_over_ragged_updates(batch: int, width: int) -> None:
    stats = AcceptanceStats(num_draft_tokens=5)
    seen = [(2, 3)]
    stats.update(make_output([2], [3]))
    for step in range(10):
        steps = random_steps(step, batch, width)
        stats.update(make_output([accepted for accepted, _ in steps], [drafted for _, drafted in steps], width))
        seen += steps
        assert_counts(stats, seen)


def test_rates_by_hand() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(make_output([3, 1, 0]))
    stats.update(make_output([1], [2]))
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (4, 11, 5)
    assert stats.acceptance_rate == 5 / 11
    assert stats.acceptance_length == 1 + 5 / 4
    assert stats.per_position == [3 / 4, 1 / 4, 1 / 4]
    assert stats.draft_tokens_per_position == [4, 4, 3]


def test_requests_without_drafts_do_not_count() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(make_output([2, 0, 0], [3, 0, 0]))
    stats.update(make_output([0, 0], width=0))
    stats.update(make_output([]))
    assert_counts(stats, [(2, 3)])


def test_tokens_after_a_stop_token_are_not_counted() -> None:
    stats = AcceptanceStats(num_draft_tokens=5)
    output = make_output([5, 5, 2, 0], width=5)  # six, six, three and one emitted tokens
    output.token_ids[0, 2] = output.token_ids[1, 5] = output.token_ids[2, 2] = 9
    stats.update(output, 1 + ((output.token_ids == 9).cumsum(1) == 0).sum(1))
    assert stats.acceptance_length == (3 + 6 + 3 + 1) / 4
    assert stats.accepted_tokens == 3 + 5 + 2 + 0
    assert stats.draft_tokens == 20  # all were verified
    assert stats.acceptance_rate == 10 / 20
    assert stats.per_position == [3 / 4, 3 / 4, 2 / 4, 1 / 4, 1 / 4]


def test_a_draft_that_is_the_last_kept_token_is_followed_by_none() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(make_output([2]), torch.tensor([2]))
    assert (stats.acceptance_length, stats.accepted_tokens) == (2.0, 2)
    stats.update(make_output([2]), torch.tensor([3]))
    assert (stats.acceptance_length, stats.accepted_tokens) == (2.5, 4)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kept_tokens_are_counted_as_in_plain_python(dtype: torch.dtype) -> None:
    stats, generator, drafts, tokens, accepted, drafted = AcceptanceStats(4), random.Random(0), 0, 0, 0, 0
    extreme = torch.iinfo(dtype)
    for step in range(20):
        steps = random_steps(step, batch=16, width=4)
        asked = [generator.choice([extreme.min, -1, 0, 1, 2, 3, 4, 5, 6, extreme.max]) for _ in steps]
        stats.update(make_output(*map(list, zip(*steps)), width=4), torch.tensor(asked, dtype=dtype))
        for (num_accepted, num_drafted), number in zip(steps, asked, strict=True):
            kept = max(0, min(number, num_accepted + 1))
            if num_drafted > 0 and kept > 0:
                drafts, tokens = drafts + 1, tokens + kept
                accepted, drafted = accepted + min(num_accepted, kept), drafted + num_drafted
    assert (stats.drafts, stats.accepted_tokens, stats.draft_tokens) == (drafts, accepted, drafted)
    assert stats.acceptance_length == tokens / drafts
    assert f"Acceptance length:        {tokens / drafts:>12.2f}" in str(stats)


def test_requests_that_had_ended_before_the_step_do_not_count() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(make_output([2, 3, 1]), torch.tensor([3, 0, -1]))
    assert_counts(stats, [(2, 3)])


def test_keeping_all_tokens_counts_as_if_nothing_was_said() -> None:
    said, unsaid = AcceptanceStats(num_draft_tokens=3), AcceptanceStats(num_draft_tokens=3)
    output = make_output([3, 1, 0, 0], [3, 2, 1, 0])
    for num_tokens in (output.num_tokens, output.num_tokens.long(), torch.full((4,), 100)):
        said.update(output, num_tokens)
        unsaid.update(output)
        assert str(said) == str(unsaid)


def test_narrower_outputs_leave_later_positions_empty() -> None:
    stats = AcceptanceStats(num_draft_tokens=4)
    stats.update(make_output([2, 1], width=2))
    assert stats.per_position == [1.0, 0.5, 0.0, 0.0]


def published_statistics() -> AcceptanceStats:
    """Return 10,000 drafts of three tokens with the per-position rates 66.63, 62.25 and 53.09 %."""
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(make_output([3] * 5309 + [2] * (6225 - 5309) + [1] * (6663 - 6225) + [0] * (10_000 - 6663)))
    return stats


def test_definitions_are_those_of_vllm_pull_request_37238() -> None:
    stats = published_statistics()
    assert round(100 * stats.acceptance_rate, 2) == 60.66
    assert round(stats.acceptance_length, 2) == 2.82
    assert stats.per_position == [0.6663, 0.6225, 0.5309]


def test_printed_block() -> None:
    assert str(published_statistics()).splitlines() == [
        "-------- Speculative decoding --------",
        "Acceptance rate (%):             60.66",
        "Acceptance length:                2.82",
        "Drafts:                          10000",
        "Draft tokens:                    30000",
        "Accepted tokens:                 18197",
        "Per-position acceptance (%):",
        "  Position 0:                    66.63",
        "  Position 1:                    62.25",
        "  Position 2:                    53.09",
        "--------------------------------------",
    ]


@pytest.mark.parametrize("device", [None, "cpu"])
def test_nothing_drafted_is_nan_and_prints(device: str | None) -> None:
    stats = AcceptanceStats(num_draft_tokens=2, device=device)
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (0, 0, 0)
    assert math.isnan(stats.acceptance_rate)
    assert math.isnan(stats.acceptance_length)
    assert len(stats.per_position) == 2
    assert all(map(math.isnan, stats.per_position))
    assert str(stats).count("nan") == 4


def test_types_are_python_numbers() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(make_output([1]))
    assert {type(count) for count in (stats.drafts, stats.draft_tokens, stats.accepted_tokens)} == {int}
    assert {type(rate) for rate in (stats.acceptance_rate, stats.acceptance_length, *stats.per_position)} == {float}


def test_reset_starts_again() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.reset()
    stats.update(make_output([3, 3]))
    stats.reset()
    assert stats.drafts == 0
    stats.update(make_output([1]))
    assert_counts(stats, [(1, 3)])


def test_counts_beyond_32_bits_are_exact() -> None:
    stats = AcceptanceStats(num_draft_tokens=2, device="cpu")
    stats._counts.fill_(2**31 - 1)  # as many as would take months to count
    stats.update(make_output([2, 1], width=2))
    assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (2**31 + 1, 2**32 + 2, 2**32 + 1)


def test_reset_keeps_the_counters_that_captured_graphs_write_to() -> None:
    stats = AcceptanceStats(num_draft_tokens=2)
    stats.update(make_output([1], width=2))
    captured = stats._counts  # what a graph would add to, at its address
    stats.reset()
    captured += 1
    assert (stats.drafts, stats.accepted_tokens) == (1, 2)


def test_threads_may_update_the_same_statistics() -> None:
    # Without a lock 60 of 100 rounds lost counts, all of them in the first update, which makes the counters.
    output, num_threads, before = make_output([1, 2]), 8, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            stats, barrier = AcceptanceStats(num_draft_tokens=3), threading.Barrier(num_threads)

            def work(stats: AcceptanceStats = stats, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                stats.update(output)

            threads = [threading.Thread(target=work) for _ in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert_counts(stats, [(1, 3), (2, 3)] * num_threads)
    finally:
        sys.setswitchinterval(before)


def test_statistics_can_be_copied_and_sent_to_other_processes() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(make_output([1]))
    for copied in (copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        copied.update(make_output([2]))
        assert_counts(copied, [(1, 3), (2, 3)])
        copied.update(make_output([3]), torch.tensor([1]))
        assert copied.acceptance_length == (2 + 3 + 1) / 3
    assert_counts(stats, [(1, 3)])


def test_update_reads_no_values() -> None:
    stats, output = AcceptanceStats(num_draft_tokens=3), make_output([1, 2], device="meta")  # which have none
    stats.update(output)
    stats.update(output, output.num_tokens)


def test_update_leaves_the_output_as_it_was() -> None:
    output = make_output([1, 2], [3, 2])
    num_tokens = torch.tensor([9, 2])
    before = [tensor.clone() for tensor in (*output[:4], num_tokens)]
    AcceptanceStats(num_draft_tokens=3).update(output, num_tokens)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((*output[:4], num_tokens), before, strict=True))


def test_statistics_begun_in_inference_mode_go_on_outside() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    with torch.inference_mode():
        stats.update(make_output([1]))
    stats.update(make_output([2]))
    assert_counts(stats, [(1, 3), (2, 3)])


def test_synthetic_verification_is_measured_at_its_schedule() -> None:
    batch = 20_000
    schedule = AcceptanceSchedule.from_mean_rate(0.69, num_draft_tokens=3)
    sampler = RejectionSampler("synthetic", schedule=schedule)
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(sampler(torch.zeros(batch, 4, 5), torch.zeros(batch, 3, dtype=torch.int64), seeds=0))
    for measured, rate in zip(stats.per_position, schedule.joint_rates, strict=True):
        assert measured == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / batch))  # false alarm 6e-7 each
    assert stats.acceptance_rate == pytest.approx(0.69, abs=0.02)


def test_wider_outputs_are_refused() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    with pytest.raises(ValueError, match=r"output: expected at most num_draft_tokens = 3 draft tokens .* got 4"):
        stats.update(make_output([1], width=4))
    assert stats.drafts == 0


def test_outputs_on_another_device_are_refused() -> None:
    stats = AcceptanceStats(num_draft_tokens=3, device="meta")
    with pytest.raises(ValueError, match="output: expected on meta, where the counters are, got cpu"):
        stats.update(make_output([1]))


@pytest.mark.parametrize(
    ("num_tokens", "error", "message"),
    [
        (3, TypeError, "expected a torch.Tensor, got int"),
        ([3, 3], TypeError, "expected a torch.Tensor, got list"),
        (torch.ones(2), TypeError, "expected dtype int32, int64, got float32"),
        (torch.ones(2, dtype=torch.bool), TypeError, "expected dtype int32, int64, got bool"),
        (torch.ones(3, dtype=torch.int64), ValueError, r"expected shape \[2\], got \[3\]"),
        (torch.ones((), dtype=torch.int64), ValueError, r"expected shape \[2\], got \[\]"),
        (torch.ones(2, 4, dtype=torch.int64), ValueError, r"expected shape \[2\], got \[2, 4\]"),
    ],
)
def test_wrong_numbers_of_kept_tokens_are_named(num_tokens: object, error: type[Exception], message: str) -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    with pytest.raises(error, match=f"^num_tokens: {message}$"):
        stats.update(make_output([1, 2]), num_tokens)  # type: ignore[arg-type]
    assert stats.drafts == 0


@pytest.mark.parametrize("output", [None, torch.zeros(1, 4), (1, 2, 3, 4)])
def test_other_things_than_outputs_are_refused(output: object) -> None:
    with pytest.raises(TypeError, match="output: expected a SamplerOutput or TreeOutput, got"):
        AcceptanceStats(num_draft_tokens=3).update(output)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_draft_tokens", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (3.0, TypeError), (None, TypeError), ("3", TypeError)],
)
def test_bad_draft_counts_are_named(num_draft_tokens: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"num_draft_tokens: expected a positive int, got {num_draft_tokens!r}"):
        AcceptanceStats(num_draft_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cuda:99", "xpu:99", "nonsense", 0.5])
def test_devices_that_are_not_there_are_named(device: object) -> None:
    with pytest.raises(ValueError, match=f"^device: expected a device that PyTorch can use here, got {device!r}"):
        AcceptanceStats(num_draft_tokens=3, device=device)  # type: ignore[arg-type]


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_update_never_synchronises() -> None:
    output = make_output([1, 2], device="cuda")
    stats = AcceptanceStats(num_draft_tokens=3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stats.update(output)
        stats.update(output, 1 + ((output.token_ids == 9).cumsum(1) == 0).sum(1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_counts(stats, [(1, 3), (2, 3)] * 2)


@needs_cuda
@pytest.mark.parametrize("begun", ["by device", "by update"])
def test_every_replay_of_a_captured_update_counts(begun: str) -> None:
    output = make_output([1, 2], [3, 2], device="cuda")
    stats = AcceptanceStats(num_draft_tokens=3, device="cuda" if begun == "by device" else None)
    steps = []
    if begun == "by update":
        stats.update(output)
        steps += [(1, 3), (2, 2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats.update(output)
    for _ in range(3):
        graph.replay()
        steps += [(1, 3), (2, 2)]
    assert_counts(stats, steps)
    output.num_accepted.copy_(torch.tensor([0, 1]))
    graph.replay()
    assert_counts(stats, [*steps, (0, 3), (1, 2)])
    stats.reset()
    graph.replay()
    assert_counts(stats, [(0, 3), (1, 2)])


@needs_cuda
def test_every_replay_counts_the_tokens_that_are_kept_then() -> None:
    output, num_tokens = make_output([1, 2], device="cuda"), torch.tensor([2, 3], device="cuda")
    stats = AcceptanceStats(num_draft_tokens=3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stats.update(output, num_tokens)
    graph.replay()
    assert stats.acceptance_length == (2 + 3) / 2
    num_tokens.copy_(torch.tensor([9, 1]))
    graph.replay()
    assert stats.acceptance_length == (2 + 3 + 2 + 1) / 4


@needs_cuda
@pytest.mark.parametrize(
    ("per_request", "message"),
    [
        (False, "device: AcceptanceStats needs one .* got None"),
        (True, "per_request: expected an update before the capture, got none"),
    ],
)
def test_counters_are_not_made_inside_a_capture(per_request: bool, message: str) -> None:
    output = make_output([1, 2], device="cuda")
    stats = AcceptanceStats(num_draft_tokens=3, per_request=per_request)
    with (
        pytest.raises(RuntimeError, match=f"^{message}"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        output.num_accepted + 1  # an empty graph would warn
        stats.update(output)
    stats.update(output)
    assert_counts(stats, [(1, 3), (2, 3)])


def test_statistics_of_several_runs_add_up() -> None:
    first, second, both = (AcceptanceStats(num_draft_tokens=3) for _ in range(3))
    for stats, seed in ((first, 0), (second, 1)):
        accepted, drafted = zip(*random_steps(seed, batch=20, width=3))
        output = make_output(list(accepted), list(drafted))
        for num_tokens in (None, torch.full((20,), 2)):
            stats.update(output, num_tokens)
            both.update(output, num_tokens)
    assert str(first + second) == str(both)
    assert str(sum([first, second])) == str(both)
    with torch.device("meta"):  # which is then the default
        assert str(first + second) == str(both)
    with pytest.raises(ValueError, match=r"^other:"):
        first + AcceptanceStats(num_draft_tokens=2)
    with pytest.raises(TypeError):
        first + 1


def test_the_histogram_counts_the_steps_that_accepted_so_many_drafts() -> None:
    stats = AcceptanceStats(num_draft_tokens=3)
    stats.update(make_output([0, 2, 3, 2, 0], [3, 2, 3, 3, 0]))
    assert stats.acceptance_histogram == [1, 0, 2, 1]
    stats.update(make_output([3]), torch.tensor([1]))  # keeps one
    assert stats.acceptance_histogram == [1, 1, 2, 1]


def test_records_of_requests_have_the_names_and_identities_of_vllm_and_aiperf() -> None:
    stats, together = AcceptanceStats(num_draft_tokens=3, per_request=True), AcceptanceStats(num_draft_tokens=3)
    for output, requests in [
        (make_output([3, 0, 1]), None),
        (make_output([2, 1], [2, 3]), torch.tensor([2, 0])),
        (make_output([0], [0]), torch.tensor([1], dtype=torch.int32)),
    ]:
        stats.update(output, requests=requests)
        together.update(output)
    assert stats.records[0] == {
        "mean_acceptance_length": 3.0,
        "draft_acceptance_rate": 4 / 6,
        "acceptance_histogram": [0, 1, 0, 1],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 6,
        "num_spec_tokens": 3,
    }
    for record in stats.records:
        histogram = record["acceptance_histogram"]
        assert sum(histogram) == record["num_spec_steps"]
        assert sum(j * steps for j, steps in enumerate(histogram)) == record["num_accepted_draft_tokens"]
    assert str(stats) == str(together)
    assert str(stats + together) == str(together + together)


def test_a_request_without_drafts_has_no_record() -> None:
    stats = AcceptanceStats(num_draft_tokens=3, per_request=True)
    assert stats.acceptance_histogram == [0, 0, 0, 0]
    stats.update(make_output([1, 0], [3, 0]))
    assert [record is None for record in stats.records] == [False, True]


def test_requests_must_be_known() -> None:
    with pytest.raises(ValueError, match=r"^device: expected None with per_request"):
        AcceptanceStats(3, "cpu", per_request=True)
    with pytest.raises(RuntimeError, match=r"^records: need"):
        _ = AcceptanceStats(3).records
    stats = AcceptanceStats(3, per_request=True)
    stats.update(make_output([1, 2]))
    with pytest.raises(ValueError, match=r"^requests: expected numbers in \[0, 2\), got 2 at \[1\]$"):
        stats.update(make_output([1, 2]), requests=torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"^requests: expected numbers in \[0, 2\), got 2 at \[2\]$"):
        stats.update(make_output([1, 2, 3]))
