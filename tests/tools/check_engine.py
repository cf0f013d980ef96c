"""Compare the texts of a serving engine under its own verification and under this package's, in one engine.

In the repository's root, with a GPU, the engine and this package installed:

    SPECDECODE_VLLM=probabilistic python -m tests.tools.check_engine vllm --target DIR --draft DIR
    python -m tests.tools.check_engine sglang --draft eagle --drawn --compare greedy tokens time

It prints a line for each part of the comparisons that `--compare` names. Of both engines there are

- `greedy`: the number of equal texts of greedy requests; for comparison, the same when the engine's own verification is
  repeated, and this package's. A model whose results depend on the batch need not repeat its texts. Different texts are
  an error if the engine must repeat its texts and does (`VLLM_BATCH_INVARIANT=1`; in SGLang, drafts that are not drawn);
  otherwise, if Fisher's exact test finds more of them than in the engine's own repetition. *Gaps* are the indices at
  which texts first differ.
- `tokens`: p-values of chi-square tests that the first four tokens of many requests with one prompt, and tokens 2 and 3, and
  all four together, have the same distribution under both. Rare tokens share cells. The prefill draws the first token in
  both cases: a control. A p-value below 1e-4 is an error: among 12 p-values this happens in at most about one of 800 runs
  if all is right. With 4,000 samples an error of total variation .12, spread over all cells, is found nine times in ten;
  smaller errors are found if they are in fewer tokens.

and the comparisons in the docstrings of `vllm_engine` and `sglang_engine`. The exit status is 1 if there is an error.
"""

import argparse
import collections
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

OURS = "ours"
REQUESTS, RUNNING = 64, 256
"""The numbers of requests whose texts are compared, and whose acceptance is compared."""
ALARM = 1e-4
Texts = list[list[int]]
Results = Iterator[tuple[str, dict[str, Any]]]


class Served(NamedTuple):
    """The texts of requests, and counts of their steps."""

    texts: Texts
    counted: dict[str, Any]


class Engine(Protocol):
    """An engine in which both verifications can be used."""

    name: str  # also the mode in which it verifies by itself
    repeats: bool  # whether it must repeat its greedy texts
    tokens: int  # tokens of each compared text
    samples: int  # requests whose tokens are compared

    def serve(self, mode: str, prompts: Texts, sampling: Any, tokens: int, held: bool = False) -> Served:
        """Serve requests under one verification.

        Args:
            mode: `OURS` or `name`.
            prompts: one per request.
            sampling: parameters of all requests, or a list with each request's.
            tokens: number of tokens of each request.
            held: start with all requests, so that batches are the same in each run.
        """

    def samplings(self) -> dict[str, dict[str, Any]]:
        """Return the kinds of requests whose tokens are compared."""

    def gaps(self, prompts: Texts, texts: Texts, others: Texts) -> list[Any]:
        """Return the first different index of each pair of different greedy texts."""

    def errors(self) -> list[str]:
        """Return the errors of the engine."""

    def close(self, status: int) -> None:
        """End the engine; the process exits with a status."""


# ---- Comparisons -----------------------------------------------------------------------------------------------------


def prompts_of(count: int, lengths: tuple[int, ...] = (24,)) -> Texts:
    """Return random prompts, the same in each run."""
    draw = random.Random(5)
    return [[draw.randrange(2, 1000) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def greedy(engine: Engine) -> Results:
    """Compare greedy texts."""
    yield "greedy", compared(engine, prompts_of(REQUESTS), {"temperature": 0.0}, ["plain"] * REQUESTS)


def compared(
    engine: Engine, prompts: Texts, sampling: Any, kinds: list[str], plain: Texts | None = None
) -> dict[str, Any]:
    """Compare the texts of requests with the first run of the engine's own verification.

    Args:
        engine: serves.
        prompts: one per request.
        sampling: as in `Engine.serve`.
        kinds: of each request; '' is not compared.
        plain: texts of plain greedy requests; *changed* counts those that differ from them.
    """
    modes = {"first": engine.name, OURS: OURS, "again": engine.name, "ours again": OURS}
    runs = {run: engine.serve(mode, prompts, sampling, engine.tokens, held=True) for run, mode in modes.items()}
    texts = {run: served.texts for run, served in runs.items()}
    result: dict[str, Any] = {"requests": sum(map(bool, kinds)), "differing": collections.Counter()}
    for kind in dict.fromkeys(filter(None, kinds)):
        own = [i for i, each in enumerate(kinds) if each == kind]
        first = [texts["first"][i] for i in own]
        result[kind] = {}
        for run in list(modes)[1:]:
            others = [texts[run][i] for i in own]
            equal = sum(text == other for text, other in zip(first, others))
            result[kind][run] = f"{equal}/{len(own)}"
            result["differing"][run] += len(own) - equal
            if kind == "plain" and run == OURS and equal < len(own):
                result[kind]["gaps"] = engine.gaps([prompts[i] for i in own], first, others)
        if plain is not None:
            result[kind]["changed"] = sum(text != plain[i][: len(text)] for i, text in zip(own, first))
    differing = result["differing"]
    most = max(differing[OURS], differing["ours again"])
    repeats = engine.repeats and differing["again"] == 0
    result["wrong"] = is_wrong(most, differing["again"], result["requests"], repeats)
    return result | {mode: runs[run].counted for run, mode in list(modes.items())[:2]}


def parts_at(text: list[int], other: list[int]) -> int:
    """Return the first index at which two texts differ."""
    return next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))


def is_wrong(ours: int, again: int, requests: int, repeats: bool) -> bool:
    """Return whether more texts differ from the engine's than its own repetition shows.

    Args:
        ours: the number of this package's texts that differ.
        again: the number of the engine's own texts that differ when it is run again.
        requests: the number of texts of each.
        repeats: whether the engine always repeats its texts, so that any difference is wrong.
    """
    from scipy import stats

    if repeats:
        return ours > 0
    table = [[ours, requests - ours], [again, requests - again]]
    return bool(stats.fisher_exact(table, alternative="greater")[1] < ALARM)


def tokens(engine: Engine) -> Results:
    """Compare the first tokens of requests with one prompt, and the counts in longer texts."""
    parts = {f"token {i + 1}": slice(i, i + 1) for i in range(4)} | {"tokens 2-3": slice(1, 3), "tokens 1-4": slice(4)}
    for name, sampling in engine.samplings().items():
        result: dict[str, Any] = {"requests": engine.samples, "p": {}}
        texts = dict[str, Texts]()
        for mode in (OURS, engine.name):
            engine.serve(mode, prompts_of(1) * 8, sampling, 8)  # compile at the first call
            texts[mode] = engine.serve(mode, prompts_of(1) * engine.samples, sampling, 6).texts
        for mode in (OURS, engine.name):
            result[mode] = engine.serve(mode, prompts_of(RUNNING), sampling, 64).counted
        for part, where in parts.items():
            samples = [[tuple(text[where]) for text in texts[mode]] for mode in (OURS, engine.name)]
            result["p"][part] = p_value(*samples)
        yield name, result


def p_value(first: list[Any], second: list[Any], least: int = 12, shared: int = 64) -> float:
    """Return the p-value of a chi-square test that two samples have one distribution.

    Args:
        first: tokens, or tuples of them.
        second: tokens, or tuples of them.
        least: the minimum count in both samples together for a separate cell.
        shared: number of cells for all others, which are distributed by hash. Random models have many rare tokens.
    """
    from scipy import stats

    samples = [collections.Counter(first), collections.Counter(second)]
    often = {value for value, count in (samples[0] + samples[1]).items() if count >= least}
    cells = [collections.Counter[Any](), collections.Counter[Any]()]
    for sample, cell in zip(samples, cells):
        for value, count in sample.items():
            cell[value if value in often else -1 - hash(value) % shared] += count
    columns = [[cell[key] for cell in cells] for key in {**cells[0], **cells[1]}]
    small = [column for column in columns if sum(column) < least]
    columns = [column for column in columns if sum(column) >= least]
    if sum(map(sum, small)) >= least:
        columns.append([sum(counts) for counts in zip(*small)])
    return float(stats.chi2_contingency(list(zip(*columns)), correction=False)[1]) if len(columns) > 1 else 1.0


COMPARISONS: dict[str, Callable[[Any], Results]] = {"greedy": greedy, "tokens": tokens}


# ---- A run -----------------------------------------------------------------------------------------------------------


def errors_of(part: str, result: dict[str, Any]) -> list[str]:
    """Return the errors in a part of a comparison."""
    errors = [f"{part}: texts differ"] if result.get("wrong") else []
    return errors + [f"{part}: {name}, p = {p:.2g}" for name, p in result.get("p", {}).items() if p < ALARM]


def checked(engine: Any, comparisons: list[Callable[[Any], Results]]) -> list[str]:
    """Print the results of comparisons; return all errors."""
    errors = list[str]()
    for compare in comparisons:
        for part, result in compare(engine):
            errors += errors_of(part, result)
            print("RESULT", part, json.dumps(result), flush=True)
    errors += engine.errors()
    print("\n".join(errors) or "no errors", flush=True)
    return errors


def main(arguments: list[str] | None = None) -> int:
    """Compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(dest="adapter", required=True)
    adapters = {name: importlib.import_module(f"tests.tools.{name}_engine") for name in ("vllm", "sglang")}
    for name, adapter in adapters.items():
        own = parsers.add_parser(name)
        own.add_argument("--compare", nargs="+", choices=[*COMPARISONS, *adapter.COMPARISONS])
        adapter.add_arguments(own)
    options = parser.parse_args(arguments)
    adapter = adapters[options.adapter]
    options.compare = options.compare or adapter.default_comparisons()
    engine, status = adapter.start(options), 1
    try:
        status = int(bool(checked(engine, [(COMPARISONS | adapter.COMPARISONS)[name] for name in options.compare])))
    finally:
        engine.close(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
