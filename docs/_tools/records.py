"""The committed benchmark records: read, checked and looked up."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

RECORDS = Path(__file__).parent.parent.parent / "tests" / "benchmarks" / "records"

KINDS = {
    "eager call": "call",
    "launch by launch": "launches",
    "reading alone": "reading",
    "numbers in tensors": "served",
    "packed": "packed",
    "in vLLM": "in vLLM",
    "truncation in vLLM": "truncation in vLLM",
    "truncated": "truncated",
    "draft vocabulary of 32,000": "draft vocabulary",
    "log-probabilities": "log-probabilities",
    "reports": "reports",
    "adjustments": "adjustments",
    "small kernels": "small kernels",
    "sizes that change": "sizes",
}
"""The kind of a group, by its first words; most groups have none of these."""

GROUP = re.compile(
    rf"((?P<of>{'|'.join(KINDS)}), )?"
    r"(?P<count>[\d,]+) (?P<what>request|row)s?(, (?P<drafts>\d+) drafts)?, "
    r"(?P<vocab>[\d,]+) tokens, (?P<dtype>\w+)(, T = (?P<temperature>[\d.]+))?(, (?P<rows>\w+ rows|rows [\w ]+))?"
)

ROWS = {None: "", "rows of SmolLM2": "real"}
"""The kinds of rows by their names in groups; other kinds have names like "flat rows"."""

TITLES = {
    "triton": "`probabilistic`",
    "nothing": "nothing",
    "triton with draft_logsumexp": "`probabilistic`, `draft_logsumexp`",
    "eager": "`probabilistic` (eager)",
    "straightforward": "PyTorch, uncompiled",
    "straightforward compiled": "PyTorch, compiled",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "flashinfer": "FlashInfer",
    "triton one-hot": "`probabilistic`, one-hot drafts",
    "triton packed": "`probabilistic`, packed",
    "triton, top-p .95": "`probabilistic`, top-p .95",
}
"""The names of providers on pages; other Triton providers are named by the words after "triton"."""


class Cell(NamedTuple):
    """One result of a record, with its provider, shape and commit."""

    kind: str  # "request", "row", or one of `KINDS`
    count: int  # requests or rows
    drafts: int
    vocab: int
    dtype: str
    temperature: float | None
    provider: str
    values: dict[str, Any]
    rows: str = "realistic"
    commit: str | None = None  # the measured commit, in seven digits

    @property
    def of_commit(self) -> str:
        """The commit mark after a number of this result, for `benchmarks.with_marks`."""
        return f"^{self.commit}^" if self.commit else ""

    @property
    def reference(self) -> float:
        """The bandwidth of the reference kernel in the run of this result, in TB/s."""
        rate: float = self.values["TB/s"] / self.values["fraction"]
        return rate

    @property
    def title(self) -> str:
        """The name of the provider on pages."""
        if self.provider in TITLES:
            return TITLES[self.provider]
        name, _, rest = self.provider.removeprefix("triton ").partition(" with ")
        name = name if name in ("greedy", "vLLM", "SGLang", "FlashInfer") or " " in name else f"`{name}`"
        return name + (f", `{rest}`" if rest else "")


@cache
def load(name: str) -> dict[str, Any]:
    """Return a record by its file's stem."""
    path = RECORDS / f"{name.strip()}.json"
    if not path.exists():
        raise LookupError(f"no record {name!r}; there are {sorted(file.stem for file in RECORDS.glob('*.json'))}")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


def cells(name: str, **wanted: object) -> list[Cell]:
    """Return a record's results that have these attributes; there must be some."""
    found = [cell for cell in all_cells(name) if all(getattr(cell, key) == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"record {name!r} has nothing with {wanted}")
    return found


def all_cells(name: str) -> Iterator[Cell]:
    """Yield a record's results."""
    record = load(name)
    for group, providers in record["results"].items():
        match = GROUP.fullmatch(group)
        if match is None:
            raise LookupError(f"record {name!r} has a group that cannot be read: {group!r}")
        temperature = match["temperature"]
        for provider, values in providers.items():
            commit = values.get("commit", record.get("commit"))
            yield Cell(
                KINDS.get(match["of"], match["what"]),
                int(match["count"].replace(",", "")),
                int(match["drafts"] or 0),
                int(match["vocab"].replace(",", "")),
                match["dtype"],
                None if temperature is None else float(temperature),
                provider,
                values,
                ROWS[match["rows"]] if match["rows"] in ROWS else match["rows"].removesuffix(" rows"),
                commit and commit[:7],
            )


def one_commit(*results: Cell) -> Cell:
    """Return the first of several results; raise unless all have the same commit."""
    if len({cell.commit for cell in results}) > 1:
        raise LookupError(f"measured at different commits: {[(cell.title, cell.commit) for cell in results]}")
    return results[0]


def look_up(where: str) -> float | str:
    """Return one number of a record.

    `h200; 256, 3, 0.7; triton` is the median time on the device for 256 requests of 3 drafts at that temperature in
    bfloat16; a fourth part names another value, as in `h200; 1, 3, 0.7; triton; call_us`, a fifth one a part of it, as in
    `h200; 256, 7, 0.7; triton strict; reading_us; every row`; `cpu; 8, 3; strict` has no temperature. `h200; gpu` is an
    entry of the record itself.
    """
    name, *parts = (part.strip() for part in where.split(";"))
    if len(parts) == 1:
        record = load(name)
        if parts[0] not in record:
            raise LookupError(f"record {name!r} has no {parts[0]!r}")
        about: float | str = record[parts[0]]
        return about
    value = result_of(where).values
    for key in parts[2:]:
        value = value[key]
    if len(parts) == 2:
        value = value.get("device_us", value)
    number: float = value["median"] if isinstance(value, dict) else value
    return number


def result_of(where: str) -> Cell:
    """Return the result that contains a number."""
    name, shape, provider, *key = (part.strip() for part in where.split(";"))
    count, drafts, *temperature = (float(number) for number in shape.split(","))
    wanted: dict[str, object] = {"count": count, "drafts": drafts, "dtype": "bfloat16", "provider": provider}
    if temperature:
        wanted["temperature"] = temperature[0]
    of = key[0].partition("_")[0] if key else ""
    kinds = (of,) if of in ("call", "reading") else ("request", "row", "truncated")
    found = [cell for cell in cells(name, **wanted) if cell.kind in kinds]
    if found and found[0].kind == "truncated":  # measured with other rows and vocabularies, too
        found = [cell for cell in found if (cell.rows, cell.vocab) == ("realistic", 151_936)]
    if len(found) != 1:
        raise LookupError(f"{where!r} names {len(found)} results")
    return found[0]
