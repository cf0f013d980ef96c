"""Known mistakes are seen and named first, and right verifiers are not accused: `python -m tests.tools.check_suspects`.

Options: --seeds 10, --requests 200000, --part right, listed, readers or servers, and mistakes by their names. The table has,
for each mistake, the number of runs that saw it, that named it first, the other names given first, and CPU seconds. Mistakes
that an error shows are in the tests. Right verifiers run five times as often, right verifiers of trees twice, right servers
ten times. Mistakes of readers run with the 20,000 requests of the course. The servers are small; they take three minutes.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable

from specdecode.checking import Report, check, check_server
from specdecode.checking.mistakes import MISTAKES
from specdecode.checking.verifiers import TOKENS
from tests.support import readers
from tests.support.planted import RIGHT, RIGHT_TREES, TREE, planted
from tests.support.served import MISTAKES as SERVED
from tests.support.served import Model, serving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mistakes", nargs="*")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--part", choices=["right", "listed", "readers", "servers"])
    options = parser.parse_args()
    wrong, started = 0, time.process_time()

    def reports(verifiers, times: int = 1, **arguments) -> Iterable[Report]:
        for seed in range(times * options.seeds):
            yield check(verifiers(seed), seed=seed, progress=False, **({"requests": options.requests} | arguments))

    def asked(part: str, mistake: str = "") -> bool:
        return options.part in (None, part) and (mistake in options.mistakes or not options.mistakes)

    if asked("right") and not options.mistakes:
        for name, (verifier, drafter) in RIGHT.items():
            wrong += judge_right(name, reports(lambda seed, verifier=verifier: verifier, 5, draft=drafter))
        for name, verifier in RIGHT_TREES.items():
            wrong += judge_right(f"trees: {name}", reports(lambda seed, verifier=verifier: verifier, 2, tree=TREE))
        wrong += judge_right("tokens, nothing allowed", reports(lambda seed: TOKENS, 2, allow=0.0))
    for name, verifier, drafter, tree in planted():
        if asked("listed", name):
            wrong += judge(name, name, reports(lambda seed, verifier=verifier: verifier, draft=drafter, tree=tree))
    for mistake, name in readers.MISTAKES.items():
        if name and asked("readers", name):
            verifiers = lambda seed, mistake=mistake: readers.reader(mistake, seed)  # noqa: E731
            wrong += judge(mistake, name, reports(verifiers, requests=20_000))
    for name in SERVED:
        if asked("servers", name):
            wrong += judge(f"server: {name}", name, (served(seed, name) for seed in range(options.seeds)))
    if asked("servers") and not options.mistakes:
        wrong += judge_right("servers", (served(seed) for seed in range(10 * options.seeds)))
    print(f"{len(MISTAKES)} mistakes, {time.process_time() - started:.0f} CPU seconds")
    return bool(wrong)


def served(seed: int, mistake: str = "") -> Report:
    """Check a small server."""
    with serving(Model(seed, mistake, again=seed)) as url:
        return check_server(url, "table", progress=False)


def judge_right(name: str, reports: Iterable[Report]) -> int:
    """Return the number of false alarms."""
    started, reports = time.process_time(), list(reports)
    alarms = sum(not report.passed for report in reports)
    p_values = [each.p_value for report in reports for each in report.checks if each.p_value is not None]
    seen = f"{alarms} alarms in {len(reports)} runs; smallest p-value {min(p_values):.2g}"
    print(f"right: {name:29} {seen}; {time.process_time() - started:.0f} s", flush=True)
    return alarms


def judge(title: str, name: str, reports: Iterable[Report]) -> int:
    """Return the number of runs in which a mistake was not seen, or not named first."""
    started, reports = time.process_time(), list(reports)
    seen = sum(not report.passed for report in reports)
    others = Counter(tuple(report.suspects[:2]) for report in reports if report.suspects[:1] != [name])
    first, spent = len(reports) - others.total(), time.process_time() - started
    print(f"{title:36} seen {seen:2}  first {first:2}  {dict(others) or ''}  {spent:.0f} s", flush=True)
    return others.total()


if __name__ == "__main__":
    sys.exit(main())
