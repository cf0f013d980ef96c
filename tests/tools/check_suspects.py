"""Every known mistake is seen and named first, and right verifiers are not accused: `python -m tests.tools.check_suspects`.

Options: --seeds 10, --requests 200000, and mistakes by their ids. The table has, for each mistake, the number of runs
that found it, that named it first, and the other names given first. Right verifiers run five times as often.
"""

import argparse
import sys
import time
from collections import Counter

from specdecode.checking import check
from specdecode.checking.mistakes import MISTAKES, Mistake
from specdecode.checking.verifiers import BLOCKS, STRICT, TOKENS, Drafter, Use, Verifier

RIGHT = {
    "tokens": (TOKENS, None),
    "tokens with their drafter": (TOKENS, Drafter()),
    "blocks": (BLOCKS, Drafter()),
    "strict": (STRICT, None),
    "strict with shared noise": (STRICT, Drafter(use=Use.OWN)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mistakes", nargs="*")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200_000)
    options = parser.parse_args()
    wrong, started = 0, time.perf_counter()
    if not options.mistakes:
        for name, (verifier, drafter) in RIGHT.items():
            wrong += judge_right(name, verifier, drafter, options)
    for name, mistake in MISTAKES.items():
        if not options.mistakes or name in options.mistakes:
            wrong += judge_mistake(name, mistake, options)
    print(f"{len(MISTAKES)} mistakes, {time.perf_counter() - started:.0f} s")
    return bool(wrong)


def judge_right(name: str, verifier: Verifier, drafter: Drafter | None, options: argparse.Namespace) -> int:
    """Return the number of false alarms."""
    seeds = range(5 * options.seeds)
    reports = [check(verifier, drafter, requests=options.requests, seed=seed, progress=False) for seed in seeds]
    alarms = sum(not report.passed for report in reports)
    p_values = [each.p_value for report in reports for each in report.checks if each.p_value is not None]
    print(f"right: {name:29} {alarms} alarms in {len(seeds)} runs; smallest p-value {min(p_values):.2g}", flush=True)
    return alarms


def judge_mistake(name: str, mistake: Mistake, options: argparse.Namespace) -> int:
    """Return the number of runs in which the mistake was not found, or not named first."""
    seen, first, others = 0, 0, Counter()
    for seed in range(options.seeds):
        report = check(mistake.verifier, mistake.drafter, requests=options.requests, seed=seed, progress=False)
        seen += not report.passed
        first += not report.passed and report.suspects[:1] == [name]
        if report.suspects[:1] != [name]:
            others[tuple(report.suspects[:2])] += 1
    print(f"{name:36} seen {seen:2}  first {first:2}  {dict(others) or ''}", flush=True)
    return options.seeds - first


if __name__ == "__main__":
    sys.exit(main())
