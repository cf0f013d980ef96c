"""Make a record of a run of `pytest --benchmark-only --benchmark-json RAW.json`.

`python tests/benchmarks/record.py RAW.json RECORD.json` keeps medians and quartile ranges, versions, commit and duration
of the run, but no single rounds and host names. `--commit HASH` names the commit if the run could not know it. A run on a
GPU keeps the GPU's benchmarks, any other run the CPU's. With `--part` the run had only some benchmarks: other results of
`RECORD.json` stay, each marked with the commit of its measurement. `python tests/benchmarks/record.py RECORD.json` prints
a record as Markdown tables.
"""

import argparse
import json
import platform
from collections.abc import Callable
from pathlib import Path

import torch


def make_record(raw: dict, commit: str | None = None) -> dict:
    on_gpu = [benchmark for benchmark in raw["benchmarks"] if is_on_gpu(benchmark)]
    kept = on_gpu or raw["benchmarks"]
    of_commit = {"commit": raw["commit_info"]["id"][:12], "uncommitted_changes": raw["commit_info"]["dirty"]}
    about = {
        "unit": "microseconds",
        **(of_commit if commit is None else {"commit": commit[:12]}),
        "date": raw["datetime"][:10],
        **(on_gpu[0]["extra_info"]["environment"] if on_gpu else cpu_environment(raw)),
        "python": raw["machine_info"]["python_version"],
        **({"benchmarks": len(kept), "seconds": raw["seconds"]} if len(kept) == len(raw["benchmarks"]) else {}),
    }
    return {**about, "results": results_of(kept)}


ENGINES = ("vLLM", "SGLang", "FlashInfer")
"""Keys of a record that hold an engine's version; a run without engines has none of them."""


def with_earlier(record: dict, earlier: dict) -> dict:
    """Return a record completed by an earlier one: its results, marked with their commit, and its engines' versions."""
    results = {group: dict(cells) for group, cells in record["results"].items()}
    for group, cells in earlier["results"].items():
        for provider, cell in cells.items():
            if provider not in results.get(group, {}):
                results.setdefault(group, {})[provider] = {"commit": earlier["commit"], **cell}
    whole = {key: value for key, value in record.items() if key not in ("benchmarks", "seconds")}
    versions = {engine: earlier[engine] for engine in ENGINES if engine in earlier.keys() - record.keys()}
    return {**whole, **versions, "results": results}


def is_on_gpu(benchmark: dict) -> bool:
    return "environment" in benchmark["extra_info"]


def results_of(benchmarks: list[dict]) -> dict[str, dict]:
    """Return the measurements by group and provider."""
    results: dict[str, dict] = {}
    for benchmark in benchmarks:
        result = gpu_result(benchmark["extra_info"]) if is_on_gpu(benchmark) else cpu_result(benchmark["stats"])
        results.setdefault(benchmark["group"], {})[benchmark["extra_info"]["provider"]] = result
    return results


def cpu_environment(raw: dict) -> dict:
    cpu = raw["machine_info"]["cpu"].get("brand_raw", platform.processor())
    return {"cpu": cpu, "threads": torch.get_num_threads(), "torch": torch.__version__}


def cpu_result(stats: dict) -> dict:
    return {key: round(1e6 * stats[key], 1) for key in ("median", "iqr")}


CALLS = ("device_us", "call_in_a_row_us", "call_us", "call_and_wait_us")
"""The times of a call, see `test_gpu`."""


def gpu_result(info: dict) -> dict:
    result = {key: info[key] for key in (*CALLS, "after_us", "reading_us") if key in info}
    if "bytes" in info:
        result["GB"] = round(info["bytes"] / 1e9, 6)
        result |= {"TB/s": info["TB/s"], "fraction": info["fraction"]}
    return result


def text(results: dict[str, dict]) -> str:
    """Return results as lines for a terminal: a heading for each group, below it a line for each provider.

    >>> print(text({"1 request": {"eager": {"median": 2500.0, "iqr": 100.0}, "block": {"median": 310.0, "iqr": 9.0}}}))
    1 request
      eager  2.50 ms (0.10)
      block  0.31 ms (0.01)
    """
    width = max(len(provider) for cells in results.values() for provider in cells)
    lines = []
    for group, cells in results.items():
        lines += ["", group]
        lines += [f"  {provider:{width}}  {'; '.join(words(cell))}" for provider, cell in cells.items()]
    return "\n".join(lines[1:])


def words(cell: dict) -> list[str]:
    """Return one provider's measurements as texts.

    >>> words({"device_us": {"median": 8.125, "iqr": 0.04}, "TB/s": 3.9, "fraction": 0.88, "GB": 0.03})
    ['8.1 µs (0.0) on the device', '3.90 TB/s (88%)']
    >>> words({"after_us": [["read_kernel", 5.0], ["emit_kernel", 8.125]]})
    ['until each launch has ended: 5.0, 8.1 µs']
    """
    said = []
    if "median" in cell:
        said.append(f"{cell['median'] / 1000:.2f} ms ({cell['iqr'] / 1000:.2f})")
    for key, what in zip(
        CALLS, ("on the device", "a call in a row", "alone until it returns", "alone until its result")
    ):
        if key in cell:
            said.append(f"{cell[key]['median']:.1f} µs ({cell[key]['iqr']:.1f}) {what}")
    if "TB/s" in cell:
        said.append(f"{cell['TB/s']:.2f} TB/s ({cell['fraction']:.0%})")
    if "after_us" in cell:
        said.append(f"until each launch has ended: {', '.join(f'{us:.1f}' for _, us in cell['after_us'])} µs")
    if "reading_us" in cell:
        said.append(", ".join(f"{name} {us:.1f}" for name, us in cell["reading_us"].items()) + " µs")
    return said


def markdown(record: dict) -> str:
    results, versions = record["results"], f"torch {record['torch']}, commit {record['commit']}"
    if "gpu" not in record:
        heading = f"{record['cpu']}, {record['threads']} threads, {versions}"
        return "\n\n".join(
            [heading, *tables(results, "median milliseconds", lambda cell: f"{cell['median'] / 1000:.2f}")]
        )
    return "\n\n".join(
        [
            f"{record['gpu']}, driver {record['driver']}, CUDA {record['cuda']}, triton {record['triton']}, {versions}; "
            f"its memory can be read at {record['read_TB/s']:.2f} TB/s, its cache faster",
            *tables(results, "median microseconds on the device", lambda cell: f"{cell['device_us']['median']:.1f}"),
            *tables(results, "TB/s, of what can be read", lambda cell: f"{cell['TB/s']:.2f}, {cell['fraction']:.0%}"),
            *tables(
                results,
                "median microseconds a call, many in a row",
                lambda cell: f"{cell['call_in_a_row_us']['median']:.0f}",
            ),
            *tables(results, "alone, until it returns", lambda cell: f"{cell['call_us']['median']:.0f}"),
            *tables(
                results, "alone, until its result is there", lambda cell: f"{cell['call_and_wait_us']['median']:.0f}"
            ),
            *tables(
                results,
                "until each launch has ended",
                lambda cell: ", ".join(f"{us:.1f}" for _, us in cell["after_us"]),
            ),
            *tables(
                results,
                "reading alone",
                lambda cell: ", ".join(f"{name} {us:.1f}" for name, us in cell["reading_us"].items()),
            ),
        ]
    )


def tables(results: dict[str, dict], title: str, show: Callable[[dict], str]) -> list[str]:
    """Return a table for each set of groups with common providers, without empty cells."""
    shown: list[tuple[list[str], dict[str, dict]]] = []
    for group, cells in results.items():
        texts = {}
        for provider, cell in cells.items():
            try:
                texts[provider] = show(cell)
            except KeyError:
                continue
        if not texts:
            continue
        providers, rows = next((table for table in shown if not texts.keys().isdisjoint(table[0])), ([], {}))
        if not providers:
            shown.append((providers, rows))
        providers += [provider for provider in texts if provider not in providers]
        rows[group] = texts
    return [table(title, providers, rows) for providers, rows in shown]


def table(title: str, providers: list[str], rows: dict[str, dict]) -> str:
    lines = [f"| {title} | " + " | ".join(provider.replace("_", " ") for provider in providers) + " |"]
    lines.append("|---" * (len(providers) + 1) + "|")
    for group, texts in rows.items():
        lines.append(f"| {group} | " + " | ".join(texts.get(provider, "") for provider in providers) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the raw JSON of a run, or a record to print")
    parser.add_argument("record", type=Path, nargs="?", help="where to write the record of a run")
    parser.add_argument("--part", action="store_true", help="keep what the record has of benchmarks that were not run")
    parser.add_argument("--commit", help="the commit that was measured, where the run could not know it")
    arguments = parser.parse_args()
    content = json.loads(arguments.run.read_text())
    if arguments.record:
        record = make_record(content, arguments.commit)
        if arguments.part:
            record = with_earlier(record, json.loads(arguments.record.read_text()))
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
    else:
        print(markdown(content))
