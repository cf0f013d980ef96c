"""A plan's choices by the sizes of a call; memory; on a GPU also compilation, and calls from several threads."""

import itertools
import threading
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch

from specdecode import RejectionSampler, kernels
from specdecode.kernels import block, first_rejected, launch, residual
from specdecode.kernels.arguments import BlockDecision, Searching
from specdecode.kernels.launch import Plan
from specdecode.kernels.signature import Signature
from tests.support.differential import case
from tests.support.kernels import DEVICE, KINDS, WAYS, PlannedCall, checked, given, needs_gpu, verify


def test_the_parts_of_the_workspace_do_not_overlap_and_are_as_long_as_they_are_said_to_be():
    requests, drafts, vocab = 3, 2, 5000
    planned = PlannedCall("block", case(requests, drafts, vocab, torch.bfloat16).to(DEVICE), large=True)
    blocks = -(-vocab // 1024)
    assert {name: len(part) for name, part in planned.parts.items()} == {
        "state": requests * (first_rejected.FIELDS.value + drafts + 1),
        "statistics": requests * (2 * drafts + 1) * 2 * blocks,
        "terms": requests * (drafts + 1) * block.TERMS.value,
        "queue": requests * drafts * residual.QUEUE_FIELDS.value,
        "residual_sums": requests * drafts * blocks,
    }
    workspace = torch.zeros(planned.values["length"], dtype=torch.int32, device=DEVICE)
    views = planned.plan.views(workspace, planned.values)
    for number, view in enumerate(views.values(), start=1):
        view.view(torch.int32).add_(number)
        assert (view.data_ptr() - workspace.data_ptr()) % 128 == 0
    for number, (name, view) in enumerate(views.items(), start=1):
        assert (view.view(torch.int32) == number).all(), name


def test_residuals_are_summed_in_one_order_wherever_that_is_done():
    """Otherwise the last bit of a sum, and rarely a token, would depend on the size of the batch."""
    widths = set()
    for way in WAYS:
        for kind in ("block", "probabilistic"):
            plan = PlannedCall(kind, case(3, 2, 5000, torch.bfloat16).to(DEVICE), **way).plan
            bundles = [bundle for _, _, bundles, _ in plan.launches for bundle in bundles]
            widths |= {bundle.BLOCK_N for bundle in bundles if isinstance(bundle, (BlockDecision, Searching))}
    assert len(widths) == 1


LIMITS = [
    ("strict", 96, 3),
    ("probabilistic", 46, 3),
    ("given logsumexp", 80, 3),
    ("block", 74, 3),
    ("deterministic", 80, 3),
]


@pytest.mark.parametrize(("kind", "requests", "drafts"), LIMITS)
def test_a_batch_is_large_from_so_many_rows_to_read_on(kind, requests, drafts):
    """384 rows for strict, 320 for probabilistic, 512 for block, counting target rows, and draft rows if they are read."""
    found = []
    for number in (requests - 1, requests):
        batch = case(number, drafts, 7, torch.float32)
        method, arguments, schedule = checked(kind.removeprefix("given logsumexp") or "probabilistic", batch)
        if kind == "given logsumexp":
            arguments = arguments._replace(draft_logsumexp=torch.zeros(number, drafts))
        with mock.patch.object(Plan, "run", autospec=True) as run:
            kernels.verify(method, arguments, schedule)
        chosen = run.call_args.args[0]
        decides_block = [
            bundle for launch in chosen.launches for bundle in launch.bundles if isinstance(bundle, BlockDecision)
        ]
        found.append(not decides_block[1].SUMS if kind == "block" else chosen.definitions["zeros"] != "0")
    assert found == [False, True]


@needs_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("requests", [8, 200])
def test_the_workspace_is_at_most_two_percent_of_the_logits(kind, requests, large):
    batch = case(requests, 3, 65536, torch.bfloat16).to("cuda")
    verify(kind, batch, large=large)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    verify(kind, batch, large=large)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 0.02 * batch.target_logits.nbytes


@needs_gpu
def test_sizes_compile_nothing_anew():
    for kind, way in itertools.product(KINDS, WAYS):
        verify(kind, case(2, 2, 2048, torch.float16).to("cuda"), **way)
    known = len(launch._variants)
    # Some of these decide while they read, some do not.
    for kind in KINDS:
        for requests, drafts, vocab in ((1, 1, 16), (16, 3, 4096), (65, 8, 160), (128, 16, 1024), (33, 4, 128256)):
            verify(kind, case(requests, drafts, vocab, torch.float16).to("cuda"))
    assert len(launch._variants) == known


def variants(call):
    """Return the compiled kernels of a call, each with its signature."""
    with mock.patch.object(Plan, "run", autospec=True) as run:
        call()
    launches = [each for made in run.call_args_list for each in made.args[0].launches]
    return {
        (each.kernel.__name__, *each.options.items(), *Signature(each.kernel.arg_names, each.bundles).key())
        for each in launches
    }


@pytest.mark.parametrize(
    "kind", ["strict", "probabilistic", "given logsumexp", "deterministic", "block", "block deterministic"]
)
def test_a_warmup_compiles_what_calls_of_all_sizes_take(kind):
    method, draft_logits, logsumexp = given(kind, case(1, 3, 2048, torch.bfloat16).to(DEVICE))
    sampler = RejectionSampler(method, backend="triton")

    def arguments(requests, drafts):
        sizes = {"target_logits": (drafts + 1, 2048), "draft_token_ids": (drafts,)}
        if draft_logits is not None:
            sizes |= {"draft_logits": (drafts, 2048)}
        if logsumexp is not None:
            sizes |= {"draft_logsumexp": (drafts,)}
        dtypes = {"draft_token_ids": torch.int64, "draft_logsumexp": torch.float32}
        made = {
            name: torch.zeros(1, *size, dtype=dtypes.get(name, torch.bfloat16), device=DEVICE)
            for name, size in sizes.items()
        }
        return {name: each.expand(requests, *each.shape[1:]) for name, each in made.items()} | {"seeds": 5}

    for most, drafts in ((3, (0, 1, 2, 3)), (100, (1, 31, 32, 40, 63, 64, 100))):
        known = variants(partial(sampler.warmup, **arguments(1, most)))
        for size in itertools.product((1, 13, 64, 132, 133, 2000) if most == 3 else (1, 2000), drafts):
            assert variants(partial(sampler, **arguments(*size))) <= known, size


@needs_gpu
@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_after_a_warmup_nothing_is_compiled(method):
    batches = [case(requests, 3, 4112, torch.bfloat16).to("cuda") for requests in (1, 20, 90, 140)]
    sampler = RejectionSampler(method, backend="triton")

    def arguments(batch):
        ids = batch.draft_token_ids.to(torch.int32)
        return (batch.target_logits, ids, batch.draft_logits), {"temperature": batch.temperature.half(), "seeds": 5}

    positional, options = arguments(batches[0])
    sampler.warmup(*positional, **options)
    known = len(launch._variants)
    for batch in [*batches, *map(without_drafts, batches)]:
        positional, options = arguments(batch)
        sampler(*positional, **options)
        sampler.draft(batch.target_logits[:, 0], **options)
    assert len(launch._variants) == known


def without_drafts(batch):
    return replace(
        batch,
        target_logits=batch.target_logits[:, :1],
        draft_token_ids=batch.draft_token_ids[:, :0],
        draft_logits=batch.draft_logits[:, :0],
    )


@needs_gpu
def test_calls_from_several_threads_on_several_streams_do_not_meet():
    batches = [case(requests, 3, 20_000, torch.bfloat16, seed=requests).to("cuda") for requests in (1, 7, 70, 260)]
    wanted = [[verify(kind, batch) for kind in KINDS] for batch in batches]
    torch.cuda.synchronize()
    wrong: list = []

    def work(batch, results):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(30):
                for kind, want in zip(KINDS, results):
                    got = verify(kind, batch)
                    stream.synchronize()
                    wrong.extend(kind for one, other in zip(got[:4], want) if not torch.equal(one, other))

    threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
