"""Boil a run of `pytest --benchmark-only --benchmark-json RAW.json` down to a record worth keeping.

`python tests/benchmarks/record.py RAW.json RECORD.json` keeps medians and quartile ranges, versions and commit, and leaves
out rounds and host names; `python tests/benchmarks/record.py RECORD.json` prints it as Markdown tables.
"""

import json
import platform
import sys
from pathlib import Path

import torch


def boil_down(raw: dict) -> dict:
    cpu = raw["machine_info"]["cpu"]
    results: dict[str, dict] = {}
    for benchmark in raw["benchmarks"]:
        stats = {key: round(1e6 * benchmark["stats"][key], 1) for key in ("median", "iqr")}
        results.setdefault(benchmark["group"], {})[benchmark["extra_info"]["provider"]] = stats
    return {
        "unit": "microseconds",
        "commit": raw["commit_info"]["id"][:12],
        "uncommitted_changes": raw["commit_info"]["dirty"],
        "date": raw["datetime"][:10],
        "cpu": cpu.get("brand_raw", platform.processor()),
        "threads": torch.get_num_threads(),
        "python": raw["machine_info"]["python_version"],
        "torch": torch.__version__,
        "results": results,
    }


def markdown(record: dict) -> str:
    lines = [f"{record['cpu']}, {record['threads']} threads, torch {record['torch']}, commit {record['commit']}", ""]
    providers = list(next(iter(record["results"].values())))
    lines.append("| median milliseconds | " + " | ".join(provider.replace("_", " ") for provider in providers) + " |")
    lines.append("|---" * (len(providers) + 1) + "|")
    for group, results in record["results"].items():
        cells = " | ".join(f"{results[provider]['median'] / 1000:.2f}" for provider in providers)
        lines.append(f"| {group} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    content = json.loads(Path(sys.argv[1]).read_text())
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(boil_down(content), indent=1) + "\n")
    else:
        print(markdown(content))
