"""Each measured number of the README and of a page is a directive of `docs/_tools/benchmarks.py`, or equals its record.

The README, the changelog and the pages that the README links to are read without the site, so they have no directives.
`MEASURED` makes their sentences and rows from the records again. A number with a unit must be in one of them, or in a text
of `NOT_MEASURED`. If a record changes, the failure shows the text to write.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = Path(__file__).parent / "benchmarks" / "records"
PAGES = sorted(page.relative_to(ROOT).as_posix() for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
pytestmark = pytest.mark.skipif(not PAGES, reason="not in a checkout")

GREEDY, PLAIN, TOP_K, TOP_P = SAMPLINGS = "greedy", "T .8", "T .8, top-k 20, top-p .95", "T .8, top-p .95"
MIN_P, QWEN = "T .8, min-p .05", "as Qwen2.5"
SMOLLM2, SMALL, LARGE = {"drafter": "n-gram"}, {"drafter": "model", "layers": 12}, {"drafter": "model", "layers": 40}


# ---- Numbers of records ----------------------------------------------------------------------------------------------


def record(name: str) -> dict:
    return json.loads((RECORDS / f"{name}.json").read_text())


def cells(name: str, **which: object) -> list[dict]:
    """Return the results in a list that have these attributes."""
    about = record(name)
    found = about.get("cells", about["results"] if "cells" not in about else None)
    return [cell for cell in found if all(cell.get(key) == value for key, value in which.items())]


def values(found: Iterable[dict], *path: str) -> list[float]:
    """Return a number of each result, by the path to it."""
    numbers = []
    for cell in found:
        for key in path:
            cell = cell[key]
        numbers.append(cell)
    return numbers


def number(value: float, digits: int = 0) -> str:
    """Show a number without a zero before the point, as in .98."""
    text = f"{value:,.{digits}f}"
    return text.removeprefix("0") if text.startswith("0.") else text


def span(numbers: Iterable[float], digits: int = 0, between: str = " to ") -> str:
    """Show the smallest and the largest number."""
    numbers = list(numbers)
    return number(min(numbers), digits) + between + number(max(numbers), digits)


def milliseconds(found: Iterable[dict], side: str, between: str = " to ") -> str:
    """Show the range of the times of a step, with one decimal below 10 ms."""
    times = [us / 1000 for us in values(found, side, "step_us")]
    return span(times, int(max(times) < 10), between)


def percent(found: Iterable[dict], *keys: str) -> list[float]:
    """Return gains of tokens a second, in percent."""
    return [100 * (cell[key] - 1) for cell in found for key in keys or ("ratio",)]


def ratio(cell: dict) -> str:
    """Show a ratio with its interval, bold if all of it is above 1 and italic if below."""
    middle, low, high = (number(cell[name], 2) for name in ("ratio", "ratio_low", "ratio_high"))
    mark = "**" if cell["ratio_low"] > 1 else "*" if cell["ratio_high"] < 1 else ""
    return f"{mark}{middle}{mark} ({low}–{high})"


def pair(engine: str, key: str, digits: int = 0, per: float = 1) -> Callable[[dict], str]:
    """Show a number of the engine's own verification / of this package's."""
    return lambda cell: "/".join(number(cell[side][key] / per, digits) for side in (engine, "ours"))


def row(*texts: str) -> str:
    return re.sub(r"\| +(?=\|)", "| ", f"| {' | '.join(texts)} |")


def claim(text: str, holds: bool) -> str:
    """Return the text of a claim about numbers, or a text that no page has if the claim is no longer true."""
    return text if holds else f"(no longer true: {text})"


def by_sampling(name: str, samplings: Iterable[str], show: Callable[[dict], str], **which: object) -> list[str]:
    """Return a column for each kind of sampling, empty where nothing was measured."""
    found = [cells(name, sampling=sampling, **which) for sampling in samplings]
    return [show(*cell) if cell else "" for cell in found]


# ---- Texts of pages --------------------------------------------------------------------------------------------------


def gains_in_vllm() -> Iterator[str]:
    for requests in (1, 32, 256):
        yield row(str(requests), *by_sampling("h200-serving-compiled", SAMPLINGS[:3], ratio, requests=requests))
    yield row("256", *by_sampling("h100-serving", SAMPLINGS[:3], ratio, requests=256, **LARGE))


def gains_in_sglang() -> Iterator[str]:
    for requests in (1, 32, 256):
        yield row(str(requests), *by_sampling("h200-sglang", SAMPLINGS[:3], ratio, requests=requests))


def readme() -> Iterator[str]:
    yield from gains_in_vllm()
    yield from gains_in_sglang()
    real = cells("h200-serving-compiled")
    yield f"A step of SmolLM2 emits {span(values(real, 'vllm', 'length') + values(real, 'ours', 'length'), 1)} tokens."
    h200, commits = record("h200"), set()
    for requests in (1, 32, 256):
        size = f"{requests} request{'s' * (requests > 1)}, 3 drafts, 49,152 tokens"
        found = h200["results"][f"truncated, {size}, bfloat16, T = 0.7, rows of SmolLM2"]
        for first, title, truncation in (str(requests), "none", "plain"), ("", TOP_K[6:], TOP_K[6:]):
            of = [found[f"{verifier}, {truncation}"] for verifier in ("probabilistic", "vllm", "sglang", "flashinfer")]
            commits |= {cell.get("commit", h200["commit"]) for cell in of}
            yield row(first, title, *[number(us, int(us < 100)) for us in values(of, "device_us", "median")])
    (commit,) = commits
    yield f"one {h200['gpu']}, commit `{commit}`."
    yield f"vLLM {h200['vLLM']}, SGLang {h200['SGLang']} and FlashInfer {h200['FlashInfer']} themselves"
    us = {cell["way"]: number(cell["us"]) for cell in cells("h100x4-exchange", batch=256, method="probabilistic")}
    yield f"take {us['exchange']} µs on four H100s; if every rank gathers all logits, {us['gather']} ("
    size = "trees of 16 nodes and depth 5, 32 requests, 151,936 tokens, bfloat16, T = 0.7"
    trees = record("h200-trees")["results"][size]
    ours, sglang = (number(trees[f"{way}, plain"]["device_us"]["median"]) for way in ("tree", "SGLang"))
    yield f"32 trees of 16 nodes take {ours} µs on one H200, with SGLang's own verification {sglang} ("


def changelog() -> Iterator[str]:
    times = record("h200-realistic-rows")["results"]
    real = {
        name.partition(", T = ")[2]: of for name, of in times.items() if name.startswith("SmolLM2, 49,152 tokens, 256")
    }
    took, takes = (
        [
            span([real[f"{t}, {truncation}"][when] for t in ("0.7", "1")])
            for truncation in ("top-k 50, top-p .95", "top-p .95")
        ]
        for when in ("before", "after")
    )
    yield f"top-k 50 with top-p .95 took {took[0]} µs and takes {takes[0]}, top-p .95 alone {took[1]} and {takes[1]}."
    random = [of for name, of in times.items() if name.startswith("without structure") and " 1 request," in name]
    yield f"one request takes up to {number(max(of['after'] - of['before'] for of in random))} µs more."
    yield f"What SGLang's engine needs takes {record('h200-sglang')['compiled_s']} seconds on 16 cores."
    (greedy,) = cells("h200-sglang", requests=256, sampling=GREEDY)
    (before,) = [line for line in record("h200-sglang-before")["lines"] if line.startswith("| 256 | greedy")]
    sglang, ours = re.search(r"\| (\d+) / (\d+) \(", before).groups()
    now, own = (number(greedy[side]["verify_host_us"]) for side in ("ours", "sglang"))
    yield f"{now} µs on the host (SGLang's own {own}) where it was {ours} ({sglang})."
    yield f"{span(values(cells('h100-serving'), 'ratio'), 2)} times the tokens a second"


def quickstart() -> Iterator[str]:
    times = record("h200-triton")["results"].values()
    older, newer = (fmean(of[i] / fmean((of[0], of[3])) for of in times) for i in (1, 2))
    yield f"{len(times)} timed calls took on average {newer:.2f} and {older:.2f} times as long as with 3.6"


def faster_when_sharded() -> str:
    """Return the gains of this package from the batch-sharded exchange, in percent."""
    sharded, default = (cells("h100x2-serving", requests=256, exchange=way) for way in ("batch-sharded", "default"))
    speeds = [{cell["sampling"]: cell["ours"]["tokens_a_second"] for cell in of} for of in (sharded, default)]
    return span(100 * (speeds[0][sampling] / speeds[1][sampling] - 1) for sampling in SAMPLINGS[1:])


def vllm() -> Iterator[str]:
    yield from gains_in_vllm()
    real = cells("h200-serving-compiled")
    yield claim("none is below.", all(cell["ratio_high"] >= 1 for cell in real))
    greedy = [cell["ratio_low"] for cell in real if cell["sampling"] == GREEDY]
    yield claim("| greedy requests on one GPU | no certain gain |", max(greedy) <= 1)
    few = [cell for cell in real if cell["requests"] <= 32 and cell["sampling"] == TOP_K]
    yield f"| top-k and top-p, up to 32 requests, a short step | {span(percent(few))} % more tokens |"
    large = [cell for sampling in (TOP_K, QWEN) for cell in cells("h100-serving", sampling=sampling, **LARGE)]
    yield f"{span(percent(large))} % more tokens"
    many = [cell for cell in real if cell["requests"] == 256]
    yield f"between {number(-min(percent(many)))} % fewer and {number(max(percent(many)))} % more"
    within = [cell for cell in many if cell["ratio_low"] <= 1 <= cell["ratio_high"]]
    yield claim("mostly within the noise |", len(within) > len(many) / 2)
    two = {way: percent(cells("h100x2-serving", requests=256, exchange=way)) for way in ("batch-sharded", "default")}
    gains = span([gain for of in two.values() for gain in of])
    yield f"| 256 sampled requests on two H100s (one model, torch.compile off) | {gains} % more"
    yield f"With the plug-in the flag gave {faster_when_sharded()} % more tokens a second"


def evidence_of_vllm() -> Iterator[str]:
    real_model, random, two = (
        record(name)["commit"] for name in ("h200-serving-real", "h100-serving", "h100x2-serving")
    )
    many, one = re.match(
        r"(\w{7})\w* where the largest graph is 1,024; .*(\w{7}) for drafts from a model", random
    ).groups()
    compiled = record("h200-serving-compiled")["commit"]
    yield f"real model: one H200, `{compiled}`, `h200-serving-compiled`; "
    yield f"without torch.compile `{real_model}`, `h200-serving-real`; "
    yield f"random models: one H100, `{many}` ("
    yield f"one request: `{one}`), `h100-serving`"
    yield f"two H100s, `{two}`, `h100x2-serving`"
    columns = (*SAMPLINGS, QWEN)
    for requests, label, which in (
        (1, "1", SMALL),
        (32, "32", SMALL),
        (256, "256", SMALL),
        (256, "256, 8.8 billion weights", LARGE),
    ):
        found = cells("h100-serving", requests=requests, **which)
        gains = by_sampling("h100-serving", columns, ratio, requests=requests, **which)
        yield row(label, milliseconds(found, "vllm", "–"), *gains)
    own = [cells("h200-serving-compiled", requests=requests) for requests in (1, 32, 256)]
    few, many = (milliseconds(of, "vllm") for of in (own[0] + own[1], own[2]))
    yield f"A step of vLLM takes {few} ms for 1 and 32 requests, {many} ms for 256,"
    real = [cells("h200-serving-real", requests=requests, **SMOLLM2) for requests in (1, 32, 256)]
    for requests in (1, 32, 256):
        which = {"requests": requests, **SMOLLM2}
        for first, name, show in (
            (str(requests), "ratio", ratio),
            ("", "tokens", pair("vllm", "length", 2)),
            ("", "`_verify`", pair("vllm", "verify_device_us")),
        ):
            yield row(first, name, *by_sampling("h200-serving-real", (*SAMPLINGS, MIN_P), show, **which))
    few, many = (span([us / 1000 for us in values(of, "vllm", "step_us")]) for of in (real[0] + real[1], real[2]))
    yield f"A step of vLLM takes {few} ms for 1 and 32 requests, {many} ms for 256 without torch.compile."
    model = cells("h200-serving-real", drafter="model")
    contain = sum(cell["ratio_low"] <= 1 <= cell["ratio_high"] for cell in model)
    yield f"without CUDA graphs, {milliseconds(model, 'vllm')} ms a step: ratios {span(values(model, 'ratio'), 2)},"
    yield f"{contain} of {len(model)} intervals contain 1"
    yield from {f"(256 requests: commit `{cell['commit']}`)" for cell in model if "commit" in cell}
    for requests in (256, 32):
        for exchange in ("default", "batch-sharded"):
            which = {"requests": requests, "exchange": exchange}
            first = str(requests) if exchange == "default" else ""
            yield row(first, exchange, "ratio", *by_sampling("h100x2-serving", SAMPLINGS[1:], ratio, **which))
            show = pair("vllm", "sample_device_us", 2, per=1000)
            yield row("", "", "GPU", *by_sampling("h100x2-serving", SAMPLINGS[1:], show, **which))
    many, few = (milliseconds(cells("h100x2-serving", requests=requests), "vllm") for requests in (256, 32))
    yield f"A step takes {many} ms with 256 requests, {few} ms with 32."
    yield f"the batch-sharded exchange gives {faster_when_sharded()} % more tokens a second than the default."
    for requests in (1, 32, 256):
        which = {"requests": requests, **SMALL}
        for first, side in (str(requests), "device"), ("", "host"):
            yield row(first, side, *by_sampling("h100-serving", SAMPLINGS, pair("vllm", f"verify_{side}_us"), **which))
    (small,) = cells("h100-serving", requests=256, sampling=TOP_K, **SMALL)
    saved, less = ((small["vllm"][key] - small["ours"][key]) / 1000 for key in ("verify_device_us", "step_us"))
    yield f"the GPU saves {number(saved, 1)} ms with top-k and top-p, the step {number(less, 1)} ms."
    (large,) = cells("h100-serving", requests=256, sampling=TOP_K, **LARGE)
    (plain,) = cells("h100-serving", requests=256, sampling=PLAIN, **LARGE)
    busy = [number(large["gpu_busy_us"][side] / 1000, 1) for side in ("ours", "vllm")]
    step, of_plain = ([number(cell[side]["step_us"] / 1000, 1) for side in ("ours", "vllm")] for cell in (large, plain))
    yield (
        f"the GPU is busy for {busy[0]} ms instead of {busy[1]}, and a step takes {step[0]} ms instead of {step[1]} "
        f"(T .8: {of_plain[0]} instead of {of_plain[1]}, within the noise)"
    )


def sglang() -> Iterator[str]:
    yield from gains_in_sglang()
    yield f"compiles the kernels ({record('h200-sglang')['compiled_s']} s on 16 cores"

    def intervals(sampling: str, *requests: int) -> list[float]:
        found = [cell for count in requests for cell in cells("h200-sglang", sampling=sampling, requests=count)]
        return sorted(percent(found, "ratio_low", "ratio_high"))

    (large,) = cells("h200-sglang", requests=256, sampling=TOP_K)
    saved = (large["sglang"]["verify_device_us"] - large["ours"]["verify_device_us"]) / 1000
    low, *_, high = intervals(TOP_K, 1, 32)
    yield (
        f"256 requests: a gain, because the GPU needs {number(saved, 1)} ms a step less. "
        f"1 or 32 requests: between {number(-low)} % fewer and {number(high)} % more tokens"
    )
    yield f"{span(-gain for gain in intervals(PLAIN, 32))} % fewer tokens with 32 requests"
    (greedy,) = cells("h200-sglang", requests=1, sampling=GREEDY)
    longer = (greedy["ours"]["verify_host_us"] - greedy["sglang"]["verify_host_us"]) / 1000
    fewer = span(-gain for gain in intervals(GREEDY, 1))
    yield f"{fewer} % fewer tokens with one request: the host needs {number(longer, 1)} ms longer"


def evidence_of_sglang() -> Iterator[str]:
    commits = [record(name)["commit"][:7] for name in ("h200-sglang", "h200-sglang-before", "h100-sglang")]
    yield "one H200, `{}`, `h200-sglang`, and `{}`, `h200-sglang-before`; one H100, `{}`, `h100-sglang`".format(
        *commits
    )
    yield f"{span(values(cells('h200-sglang'), 'pairs'))} pairs"
    for requests in (256, 32, 1):
        for first, name, show in (
            (str(requests), "ms a step without", lambda cell: number(cell["sglang"]["step_us"] / 1000, 1)),
            ("", "device", pair("sglang", "verify_device_us")),
            ("", "host", pair("sglang", "verify_host_us")),
        ):
            yield row(first, name, *by_sampling("h200-sglang", SAMPLINGS[:3], show, requests=requests))
    greedy = cells("h200-sglang", sampling=GREEDY)
    ours, own = (span(round(us, -1) for us in values(greedy, side, "verify_host_us")) for side in ("ours", "sglang"))
    yield f"two of them Triton kernels ({ours} µs), SGLang's own five ({own} µs)."


def benchmarks() -> Iterator[str]:
    times = record("h200-realistic-rows")["results"]
    ratios = [of["after"] / of["before"] for name, of in times.items() if name.startswith("SmolLM2")]
    yield f"{min(ratios):.2f} to {max(ratios):.2f} of the time with levels from blocks on these rows"


def measurements() -> Iterator[str]:
    about = record("h100-truncation")
    top_p, top_k, wide, _ = about["results"].values()
    per_us = 1000 * about["clock_GHz"]
    shares = [100 * of["list groups"] / of["all"] for of in (top_p, top_k)]
    yield f"{span(of['all'] / per_us for of in (top_p, top_k))} µs of one program"
    yield f"reads the blocks above the level and lists their groups: {span(shares)} %"
    search, last = (number(wide[part] / per_us) for part in ("search of a wide row", "its last pass"))
    yield f"{search} µs to search, {last} more for the last pass."
    for variant, rows, title in (
        ("del-bounds", "", "truncation: no draft surely accepted or rejected"),
        ("del-sure", "", "truncation: no draft surely accepted"),
        ("del-block2", "", "`block`: sums decide in all batches, bounds in none"),
        ("del-block2-all", "", "the same, and sums draw the token, where bounds find its block"),
        ("del-levels-mass", "", "truncation: levels from sorted maxima"),
        ("del-guess", "flat", "(#truncated-steps-other-rows-and-methods)"),
        ("del-guess", "peaked|served", "the same, other rows"),
    ):
        (found,) = [group for group in record("h100-deletions")["results"].values() if variant in group["of"]]
        times: dict[str, list[float]] = {"1": [], "32": [], "256": []}
        for cell, us in found["us"].items():
            if re.search(rows, cell) and (requests := cell.split()[1]) in times:
                times[requests].append(us[found["of"].index(variant)] / us[0])
        columns = [dict.fromkeys(f"{of(ratios):.2f}" for of in (min, max)) for ratios in times.values()]
        yield f"{title} | {' | '.join(map(' to '.join, columns))} |"


def tensor_parallel() -> Iterator[str]:
    names = [f"h100x{ranks}-exchange{truncated}" for ranks in (2, 4) for truncated in ("", "-truncated")]
    slower = []
    for name in names:
        us = {(cell["way"], cell["method"]): cell["us"] for cell in cells(name, batch=1)}
        slower += [us[way, of] - us[way.replace("exchange", "gather"), of] for way, of in us if "exchange" in way]
    yield f"With one request {span(slower)} µs slower than gathering"


MEASURED: dict[str, Callable[[], Iterator[str]]] = {
    "README.md": readme,
    "CHANGELOG.md": changelog,
    "docs/benchmarks.md": benchmarks,
    "docs/use/quickstart.md": quickstart,
    "docs/use/sglang.md": sglang,
    "docs/use/tensor-parallel.md": tensor_parallel,
    "docs/use/vllm.md": vllm,
    "docs/use/evidence/measurements.md": measurements,
    "docs/use/evidence/sglang.md": evidence_of_sglang,
    "docs/use/evidence/vllm.md": evidence_of_vllm,
}

NOT_MEASURED = {
    # How long a command may take.
    "CONTRIBUTING.md": ["no more than 8 minutes on two cores", "about 50 minutes on one core"],
    "README.md": ["about 8 minutes on two cores"],
    # Settings, limits and inputs.
    "docs/benchmarks.md": ["30 ms of warm-up", "4.8 TB/s"],  # the latter: NVIDIA's figure
    "docs/theory/adjustments.md": ["5 % were emitted"],
    "docs/use/tensor-parallel.md": ["NCCL's default is 10 minutes"],
    "docs/use/transformers.md": ["Vocabulary sizes may differ by 1 %"],
    "docs/use/vllm.md": [
        "Every 60 seconds",
        "[.4 % of bfloat16 logits](serving.md#memory), truncated 9 to 15 %, masks 6 %",
    ],
    # Of papers, engines and makers of GPUs, each with its source.
    "docs/learn/drafting.md": ["in 3.3 ms", "in 0.016 ms, four in 0.065 ms"],
    "docs/theory/block.md": [
        "8.5&nbsp;% more, and 5 to 8&nbsp;% in time",
        "4.1&nbsp;% more",
    ],  # the latter: computed there
    "docs/use/choosing.md": ["42.60&nbsp;% instead of 60.66&nbsp;%", "8.5&nbsp;%", "3.2&nbsp;%"],
    # Examples, and numbers that tests compute.
    "docs/theory/floating-point.md": ["wrong by 40 %"],
    "docs/theory/truncation.md": [
        "16 % shorter at top-k 1, and 3 % at top-k 20",
        "65 % of a language model's 50 likeliest",
    ],
    "docs/use/metrics.md": ['"acceptance at position 2: 46 %"'],
}


# ---- The test --------------------------------------------------------------------------------------------------------

UNITS = r"µs|us|ms|s|seconds?|minutes?|[TG]B/s|tokens a second|%(?! intervals?\b)|times (?:as|the)\b|of the time\b"
QUANTITY = re.compile(rf"(?<![\w.,])[\d.,]*\d(?:\s|&nbsp;)?(?:{UNITS})(?!\w)")
NO_PROSE = re.compile(r"^---\n.*?^---\n|^ *(```+).*?^ *\1`*$|`[^`\n]*`|<[a-z]+ [^>\n]*>", re.M | re.S)
TABLE = re.compile(r"^(?:\|[^\n]*\n)+", re.M)
IN_UNITS = re.compile(r"µs|\bms\b|[Mm]icroseconds|[Ss]econds|[Tt]okens a second")
CELL = re.compile(r"(?<=\|) *([^|\w]*\d[\d\W]*?) *(?=\|)")


def quantities(text: str) -> Iterator[re.Match]:
    """Yield numbers with a unit, and numbers in tables whose head, or the text before, names a unit of time."""
    prose = NO_PROSE.sub(lambda found: re.sub(r"[^\n|]", "·", found[0]), text)
    yield from QUANTITY.finditer(prose)
    for table in TABLE.finditer(prose):
        before = "\n".join(text[: table.start()].rstrip().splitlines()[-2:])
        if IN_UNITS.search(before + text[table.start() : text.index("\n", table.start())]):
            yield from CELL.finditer(prose, *table.span())


@pytest.mark.parametrize("page", PAGES)
def test_each_measured_number_of_a_page_equals_its_record(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [quantity.span() for quantity in quantities(text)]
    covered, missing = [], []
    for expected in [*MEASURED.get(page, list)(), *NOT_MEASURED.get(page, [])]:
        places = [place.span() for place in re.finditer(re.sub(r"(\\ )+", r"\\s+", re.escape(expected)), text)]
        covered += places
        if not places:
            missing.append(expected)
    assert not missing, f"{page} should say, by the records or by tests/test_numbers.py:\n" + "\n".join(missing)
    loose = [text[start:end] for start, end in found if not any(a <= start and end <= b for a, b in covered)]
    assert not loose, (
        f"{page}: {loose}. Where the site renders the page, write `#!measured` or a `benchmark` fence. Elsewhere make the "
        "text from a record in MEASURED of tests/test_numbers.py. What is no measurement belongs to NOT_MEASURED there."
    )


def test_a_number_without_a_record_is_found():
    text = "Takes 3 µs, 1.2 times as long and `5 ms`.\nIn ms:\n\n| a | b |\n|--:|--:|\n| 1 | 2.5/3 |\n"
    assert [text[slice(*found.span())].strip() for found in quantities(text)] == ["3 µs", "1.2 times as", "1", "2.5/3"]


@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="not in a checkout")
def test_every_page_with_measured_numbers_exists():
    assert {*MEASURED, *NOT_MEASURED} <= set(PAGES)
