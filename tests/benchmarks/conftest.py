"""The output of `pytest --benchmark-only`: first the benchmarks to run, at the end one table."""

import json
import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks.record import results_of, text

RECORDS = Path(__file__).parent / "records"
START = time.monotonic()
TOP, MEASURED = pytest.StashKey[list[str]](), pytest.StashKey[list[dict]]()


def pytest_collection_modifyitems(config, items):
    """Deselect tests and the benchmarks that cannot run here: one line reports them instead of hundreds."""
    if not config.getoption("benchmark_only"):
        return
    benchmarks = [item for item in items if "benchmark" in getattr(item, "fixturenames", ())]
    left_out = [item for item in benchmarks if getattr(item.module, "WHY_NOT", None)]
    kept = [item for item in benchmarks if item not in left_out]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept

    lines = config.stash[TOP] = []
    if left_out:
        lines.append(f"{len(left_out)} benchmarks on a GPU are left out: {left_out[0].module.WHY_NOT}")
    for modules, device, record in (
        (("test_cpu",), "the CPU", "cpu"),
        (("test_gpu", "test_small_kernels"), torch.cuda.get_device_name() if torch.cuda.is_available() else "", "h200"),
    ):
        if count := sum(item.path.stem in modules for item in kept):
            lines.append(f"{count} benchmarks on {device}{last_time(record)}")


def last_time(name: str) -> str:
    """Return the duration of a record's run as text, if the record has it."""
    record = json.loads((RECORDS / f"{name}.json").read_text())
    if "seconds" not in record:
        return ""
    return f"; {record['benchmarks']} took {record['seconds'] / 60:.1f} minutes on {record.get('gpu') or record['cpu']}"


def pytest_report_collectionfinish(config):
    return config.stash.get(TOP, [])


@pytest.fixture(autouse=True)
def measured(request):
    """Keep the results of a benchmark."""
    benchmark = request.getfixturevalue("benchmark") if "benchmark" in request.fixturenames else None
    yield
    if benchmark is not None and benchmark.stats is not None:
        stats = {name: getattr(benchmark.stats.stats, name) for name in ("median", "iqr")}
        kept = {"group": benchmark.group, "extra_info": benchmark.extra_info, "stats": stats}
        request.config.stash.setdefault(MEASURED, []).append(kept)


def pytest_benchmark_update_json(output_json):
    output_json["seconds"] = round(time.monotonic() - START)


def pytest_terminal_summary(terminalreporter, config):
    if benchmarks := config.stash.get(MEASURED, []):
        terminalreporter.section("medians (and the distance between the quartiles)")
        terminalreporter.write_line(text(results_of(benchmarks)))
