"""Known mistakes are seen and named first, and right verifiers are not accused: `python -m tests.tools.check_suspects`.

Options: --seeds 10, --requests 200000, --part right, listed or readers, and mistakes by their names. The table has, for each
mistake, the number of runs that saw it, that named it first, the other names given first, and CPU seconds. Mistakes that an
error shows are in the tests. Right verifiers run five times as often, right verifiers of trees twice. Mistakes of readers
run with the 20,000 requests of the course.
"""

import argparse
import sys
import time
from collections import Counter

from specdecode.checking import check
from specdecode.checking.mistakes import MISTAKES
from specdecode.checking.mistakes.trees import REJECTION, TARGET_ONLY, TREE
from specdecode.checking.verifiers import BLOCKS, STRICT, TOKENS, Drafter, Use
from tests.support import readers
from tests.support.planted import Walk, planted

CHAIN = {"tree": None}
TREES = {"tree": TREE}
RIGHT = {
    "tokens": (5, TOKENS, None, CHAIN),
    "tokens with their drafter": (5, TOKENS, Drafter(), CHAIN),
    "blocks": (5, BLOCKS, Drafter(), CHAIN),
    "strict": (5, STRICT, None, CHAIN),
    "strict with shared noise": (5, STRICT, Drafter(use=Use.OWN), CHAIN),
    "trees: rejection": (2, REJECTION, None, TREES),
    "trees: target-only": (2, TARGET_ONLY, None, TREES),
    "trees: walk": (2, Walk(), None, TREES),
    "tokens, nothing allowed": (2, TOKENS, None, {"allow": 0.0}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mistakes", nargs="*")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--part", choices=["right", "listed", "readers"])
    options = parser.parse_args()
    wrong, started = 0, time.process_time()
    if options.part in (None, "right") and not options.mistakes:
        for name, subject in RIGHT.items():
            wrong += judge_right(name, *subject, options)
    if options.part in (None, "listed"):
        for name, verifier, drafter, tree in planted():
            if not options.mistakes or name in options.mistakes:
                arguments = {"draft": drafter, "tree": tree, "requests": options.requests}
                wrong += judge(name, name, lambda seed, verifier=verifier: verifier, arguments, options.seeds)
    if options.part in (None, "readers"):
        for mistake, name in readers.MISTAKES.items():
            if name and (not options.mistakes or name in options.mistakes):
                verifiers = lambda seed, mistake=mistake: readers.reader(mistake, seed)  # noqa: E731
                wrong += judge(mistake, name, verifiers, {"requests": 20_000}, options.seeds)
    print(f"{len(MISTAKES)} mistakes, {time.process_time() - started:.0f} CPU seconds")
    return bool(wrong)


def judge_right(name: str, times: int, verifier, drafter, arguments: dict, options: argparse.Namespace) -> int:
    """Return the number of false alarms."""
    seeds, started = range(times * options.seeds), time.process_time()
    reports = [
        check(verifier, drafter, requests=options.requests, seed=seed, progress=False, **arguments) for seed in seeds
    ]
    alarms = sum(not report.passed for report in reports)
    p_values = [each.p_value for report in reports for each in report.checks if each.p_value is not None]
    seen = f"{alarms} alarms in {len(seeds)} runs; smallest p-value {min(p_values):.2g}"
    print(f"right: {name:29} {seen}; {time.process_time() - started:.0f} s", flush=True)
    return alarms


def judge(title: str, name: str, verifiers, arguments: dict, seeds: int) -> int:
    """Return the number of runs in which it was not seen, or not named first; `verifiers(seed)` is checked."""
    seen, first, others, started = 0, 0, Counter(), time.process_time()
    for seed in range(seeds):
        report = check(verifiers(seed), **arguments, seed=seed, progress=False)
        seen += not report.passed
        first += not report.passed and report.suspects[:1] == [name]
        if report.suspects[:1] != [name]:
            others[tuple(report.suspects[:2])] += 1
    spent = time.process_time() - started
    print(f"{title:36} seen {seen:2}  first {first:2}  {dict(others) or ''}  {spent:.0f} s", flush=True)
    return seeds - first


if __name__ == "__main__":
    sys.exit(main())
