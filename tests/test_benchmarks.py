"""`pytest --benchmark-only` finds its benchmarks without collecting the tests, and records have the results of a run."""

import json
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from specdecode import RejectionSampler
from tests.benchmarks import compare, inputs
from tests.benchmarks.record import make_record, markdown, text, with_earlier, words

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / "specdecode").is_dir(), reason="not in a checkout")
def test_benchmarks_are_found_without_collecting_the_tests():
    command = [sys.executable, "-m", "pytest", "--benchmark-only", "--collect-only", "-q", "-p", "no:cacheprovider"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^(\S+)::\S+", said, flags=re.M)
    on_gpu = {"tests/benchmarks/test_gpu.py", "tests/benchmarks/test_small_kernels.py"}
    assert set(found) == {"tests/benchmarks/test_cpu.py"} | (on_gpu if torch.cuda.is_available() else set())
    assert len(said.splitlines()) < len(found) + 10
    assert torch.cuda.is_available() or "benchmarks on a GPU are left out: there is no CUDA device" in said


def run_of(*benchmarks: dict) -> dict:
    """Return the part of a pytest-benchmark file that records use."""
    machine = {"python_version": "3.11.7", "cpu": {"brand_raw": "a CPU"}}
    commit = {"id": "0123456789abcdef", "dirty": False}
    about = {"commit_info": commit, "datetime": "2026-01-02T03:04:05", "machine_info": machine, "seconds": 90}
    return {**about, "benchmarks": list(benchmarks)}


def test_a_record_of_a_cpu_has_milliseconds_and_how_long_the_run_took():
    stats = {"median": 0.0025, "iqr": 0.0001}
    record = make_record(run_of({"group": "1 request", "extra_info": {"provider": "eager"}, "stats": stats}))
    assert record["results"] == {"1 request": {"eager": {"median": 2500.0, "iqr": 100.0}}}
    assert (record["benchmarks"], record["seconds"], record["commit"]) == (1, 90, "0123456789ab")
    assert "| 1 request | 2.50 |" in markdown(record)
    assert json.loads(json.dumps(record)) == record


def test_a_record_of_a_gpu_has_the_time_on_the_device_and_the_bandwidth():
    environment = {"gpu": "a GPU", "driver": "1", "cuda": "13.0", "torch": "2", "triton": "3", "read_TB/s": 4.4}
    info = {"provider": "triton", "environment": environment, "device_us": {"median": 8.125, "iqr": 0.04}}
    info |= {"bytes": 30_000_000, "TB/s": 3.9, "fraction": 0.88}
    on_cpu = {"group": "1 request", "extra_info": {"provider": "eager"}, "stats": {"median": 0.1, "iqr": 0.1}}
    record = make_record(run_of({"group": "1 request", "extra_info": info, "stats": {}}, on_cpu))
    assert list(record["results"]["1 request"]) == ["triton"]
    assert record["gpu"] == "a GPU"
    assert "seconds" not in record  # otherwise the CPU's benchmarks would count, too
    assert "| 1 request | 8.1 |" in markdown(record)
    assert "triton  8.1 µs (0.0) on the device; 3.90 TB/s (88%)" in text(record["results"])


def test_everything_that_is_measured_is_shown():
    time = {"median": 20.0, "iqr": 1.0}
    cell = {"call_in_a_row_us": time, "call_us": time, "call_and_wait_us": time}
    cell |= {"after_us": [["", 5.0]], "reading_us": {"every row": 9.0}}
    said = "; ".join(words(cell))
    for part in ("in a row", "until it returns", "until its result", "has ended: 5.0", "every row 9.0"):
        assert part in said


def test_what_was_not_measured_again_says_at_which_commit_it_was():
    old, new = {"median": 9.0, "iqr": 1.0}, {"median": 8.0, "iqr": 1.0}
    earliest = {"commit": "c0", "vLLM": "1", "SGLang": "1", "results": {"3 requests": {"eager": old}}}
    earlier = with_earlier({"commit": "c1", "results": {"1 request": {"eager": old, "strict": old}}}, earliest)
    record = with_earlier(
        {"commit": "c2", "seconds": 5, "vLLM": "2", "results": {"1 request": {"strict": new}}}, earlier
    )
    assert record == {
        "commit": "c2",
        "vLLM": "2",
        "SGLang": "1",
        "results": {
            "1 request": {"strict": new, "eager": {"commit": "c1", **old}},
            "3 requests": {"eager": {"commit": "c0", **old}},
        },
    }


@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_inputs_of_the_benchmarks_are_drafts_that_a_method_takes(method):
    batch = inputs.Inputs(4, 3, torch.bfloat16, 0.7, vocab=1100)
    draft = batch.drafts(method)
    options = {} if method == "strict" else {"draft_logsumexp": draft.logsumexp}
    output = inputs.verification(batch, RejectionSampler(method), draft, **options)()
    assert 0 < int(output.num_accepted.sum()) <= 12
    packed = inputs.packed_verification(batch, RejectionSampler(method), draft, **options)()
    assert all(map(torch.equal, packed[:4], output[:4]))
    narrow, ids = inputs.with_draft_vocabulary(batch, 300)
    drawn = narrow.drafts(method)
    drawn = drawn._replace(token_ids=ids[drawn.token_ids])
    options = {} if method == "strict" else {"draft_vocab_ids": ids}
    few = inputs.verification(narrow, RejectionSampler(method), drawn, **options)()
    narrow.draft_logits = inputs.spread(narrow.draft_logits, ids, 1100)
    whole = inputs.verification(narrow, RejectionSampler(method), drawn)()
    assert all(map(torch.equal, few[:4], whole[:4]))
    assert method == "strict" or few.num_accepted.sum() > 4  # of 12
    tokens = inputs.straightforward(batch.target_logits, draft.token_ids, batch.draft_logits, 0.7)
    assert ((tokens >= -1) & (tokens < 1100)).all()


def test_real_rows_are_read_from_the_file_that_a_variable_names(monkeypatch, tmp_path):
    target = torch.arange(10.0)[:, None].expand(10, 49_152).bfloat16()
    torch.save({"target": target, "draft": target + 16}, tmp_path / "rows.pt")
    monkeypatch.setenv("SPECDECODE_ROWS", str(tmp_path / "rows.pt"))
    batch = inputs.Inputs(3, 3, torch.bfloat16, 0.7, rows="real", vocab=49_152)
    assert batch.target_logits[..., 0].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
    assert batch.draft_logits[..., 0].tolist() == [[16, 17, 18], [20, 21, 22], [24, 25, 16]]
    with pytest.raises(ValueError, match="49152 tokens"):
        inputs.Inputs(1, 3, torch.bfloat16, 0.7, rows="real")


@pytest.mark.skipif(not (ROOT / "specdecode").is_dir(), reason="not in a checkout")
def test_a_comparison_makes_the_same_rows_for_a_checkout_that_lacks_them(monkeypatch, tmp_path):
    """The older checkout's `tests.benchmarks.inputs` is not imported, its package is."""
    pytest.importorskip("triton")
    shutil.copytree(ROOT / "specdecode", tmp_path / "specdecode")
    (tmp_path / "tests" / "benchmarks").mkdir(parents=True)
    (tmp_path / "tests" / "benchmarks" / "inputs.py").write_text("raise ImportError('of the other checkout')")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = Namespace(
        shapes="1x1", temperatures="0.7", vocab="1100", rows="realistic", truncations="none", methods="strict"
    )
    cell = "strict 1 1 0.7 1100 realistic none"
    assert compare.cells(options) == [cell]
    workers = [compare.Worker(str(checkout)) for checkout in (ROOT, tmp_path)]
    try:
        assert len({worker.ask(f"tokens {cell}") for worker in workers}) == 1
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.communicate()  # closes the pipes
