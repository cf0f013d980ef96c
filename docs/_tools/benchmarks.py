"""Tables and plots of the committed records, as a fence; single numbers of them, in a sentence.

    ```benchmark
    table: verification
    record: h200
    ```

    takes `#!measured h200; 256, 3, 0.7; triton` and is `#!ratio h200; 8, 3, 0.7; straightforward / h200; 8, 3, 0.7; triton`
    as fast; tokens a second change by `#!range gains; h200-serving-compiled; n-gram; greedy`

The build fails if a record lacks a number, or if a difference or ratio mixes times of this package at two commits.

A number of a table is followed by `^commit^`, see `Cell.of_commit`. `with_marks` replaces these by letters, and adds a
line under the table that explains them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

from pymdownx.inlinehilite import InlineHiliteException
from pymdownx.superfences import SuperFencesException

from docs._tools.bars import Bar, bars
from docs._tools.records import Cell, all_cells, cells, load, look_up, one_commit, result_of
from docs._tools.svg import Series, plot


def benchmark_fence(source: str, language: str, css_class: str, options: dict[str, Any], md: Any, **kwargs: Any) -> str:
    """Return the table or plot of a fence."""
    asked = dict(re.split(r"\s*:\s*", line.strip(), maxsplit=1) for line in source.strip().splitlines())
    try:
        kind = next(key for key in ("table", "plot") if key in asked)
        show = (TABLES if kind == "table" else PLOTS)[asked.pop(kind)]
        return show(**asked)
    except (LookupError, TypeError, ValueError, StopIteration) as error:
        raise SuperFencesException(f"benchmark: {source.strip()!r}: {error!r}") from error


def measured_inline(source: str, language: str, css_class: str, md: Any) -> str:
    """Return one number of a record, with its unit."""
    try:
        value = look_up(source)
        if len(source.split(";")) == 2:  # the record's own value, in its own unit
            return f"{value:.2f}" if isinstance(value, float) else escape(str(value))
        return f"{shown(float(value))}&nbsp;µs"
    except (LookupError, TypeError, ValueError) as error:
        raise InlineHiliteException(f"measured: {source!r}: {error!r}") from error


def ratio_inline(source: str, language: str, css_class: str, md: Any) -> str:
    """Return the ratio of two numbers of records; they may differ in commit only if one is not of this package's code."""
    try:
        above, below = source.split(" / ")
        if own := [cell for cell in (result_of(above), result_of(below)) if is_own(cell)]:
            one_commit(*own)
        return f"{float(look_up(above)) / float(look_up(below)):.1f}"
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InlineHiliteException(f"ratio: {source!r}: {error!r}") from error


def range_inline(source: str, language: str, css_class: str, md: Any) -> str:
    """Return the smallest and the largest of several numbers of a record, in percent."""
    try:
        what, *where = (part.strip() for part in source.split(";"))
        values = RANGES[what](*where)
        return f"{round(100 * min(values))} to {round(100 * max(values))}&nbsp;%"
    except (LookupError, TypeError, ValueError) as error:
        raise InlineHiliteException(f"range: {source!r}: {error!r}") from error


def gains(record: str, drafter: str, sampling: str) -> list[float]:
    """Return the relative changes of tokens a second in an engine, of greedy or of sampled requests."""
    return [
        cell["ratio"] - 1
        for cell in load(record)["cells"]
        if cell.get("drafter", load(record).get("draft")) == drafter
        and (cell["sampling"] == "greedy") == (sampling == "greedy")
    ]


def spreads(record: str, kind: str, value: str) -> list[float]:
    """Return the interquartile ranges of a time, relative to its medians."""
    times = [cell.values[value] for cell in cells(record, kind=kind) if value in cell.values]
    return [time["iqr"] / time["median"] for time in times]


RANGES: dict[str, Callable[..., list[float]]] = {"gains": gains, "spreads": spreads}


def shown(value: float) -> str:
    """Return a number with one decimal, or without decimals if it is large or an integer."""
    return f"{value:,.0f}" if value >= 1000 or isinstance(value, int) else f"{value:.1f}"


def with_marks(texts: Iterable[str]) -> tuple[list[str], str]:
    """Return texts with a letter at each number of a less frequent commit, and a line of HTML with the commits.

    >>> with_marks(["8.1^7a917ca^", "9.0^7a917ca^ (8.8^64c83f6^)", ""])[0]
    ['8.1', '9.0 (8.8ᵃ)', '']
    """
    texts = list(texts)
    number = Counter(commit for text in texts for commit in OF_COMMIT.findall(text))
    if not number:
        return texts, ""
    most = number.most_common(1)[0][0]
    letters = {most: ""} | dict(zip((commit for commit in number if commit != most), "ᵃᵇᶜᵈᵉᶠᵍʰ", strict=False))
    said = [f"{letter} at " * bool(letter) + f"<code>{commit}</code>" for commit, letter in letters.items()]
    line = f'<p class="commits">specdecode at commit {"; ".join(said)}</p>'
    return [OF_COMMIT.sub(lambda commit: letters[commit[1]], text) for text in texts], line


OF_COMMIT = re.compile(r"\^(\w+)\^")


def html_table(head: Iterable[str], rows: Iterable[Iterable[str]], text_columns: int = 1) -> str:
    """Return a table whose first columns are text and whose other columns are numbers; text in backticks is code."""

    def cell(tag: str, content: str, is_text: bool) -> str:
        html = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(content))
        return f"<{tag}>{html}</{tag}>" if is_text else f'<{tag} class="number">{html}</{tag}>'

    def row(tag: str, contents: Iterable[str]) -> str:
        return f"<tr>{''.join(cell(tag, content, i < text_columns) for i, content in enumerate(contents))}</tr>"

    rows = [list(contents) for contents in rows]
    texts, commits = with_marks(content for contents in rows for content in contents)
    marked = iter(texts)
    body = "".join(row("td", [next(marked) for _ in contents]) for contents in rows)
    return f"<table><thead>{row('th', head)}</thead><tbody>{body}</tbody></table>{commits}"


def pivot(head: list[str], found: Iterable[tuple[tuple[str, ...], str, str]], text_columns: int = 1) -> str:
    """Return a table of numbers, each given with the first cells of its row and the head of its column."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for first, column, content in found:
        rows.setdefault(first, {})[column] = content
        columns[column] = None
    if not rows:
        raise LookupError("no cell holds what is to be shown")
    table = [[*first, *[row.get(column, "") for column in columns]] for first, row in rows.items()]
    return html_table([*head, *columns], table, text_columns)


def by_shape(results: list[Cell], first: str, show: Callable[[dict[str, Any]], str]) -> str:
    """Return a table of cells: a row for each provider, a column for each number of requests and drafts.

    There are more providers than sizes of batches, and their names are long: as columns they would not fit a page.
    """
    found = []
    for cell in results:
        try:
            content = show(cell.values) + cell.of_commit
        except KeyError:
            continue
        found.append(((cell.title,), shape(cell) if cell.kind != "row" else f"{cell.count:,}", content))
    return pivot([first], found)


def shape(cell: Cell) -> str:
    """Return the number of requests and of drafts, on one line."""
    return f"{cell.count:,},\N{NO-BREAK SPACE}{cell.drafts}"


def device_time(values: dict[str, Any]) -> str:
    """Show the median on the device."""
    return shown(values["device_us"]["median"])


def bandwidth(values: dict[str, Any]) -> str:
    """Show the read bandwidth, and its share of the reference kernel's bandwidth."""
    return f"{values['TB/s']:.2f} ({values['fraction']:.0%})"


def megabytes(values: dict[str, Any]) -> str:
    """Show the bytes that an outcome needs."""
    return f"{1000 * values['GB']:,.1f}"


def environment_table(record: str) -> str:
    """Describe the environment of a record."""
    about = load(record)
    wanted = (
        "gpu",
        "cpu",
        "threads",
        "driver",
        "cuda",
        "nccl",
        "torch",
        "triton",
        "python",
        "vLLM",
        "SGLang",
        "FlashInfer",
    )
    names = {
        "gpu": "GPU",
        "cpu": "CPU",
        "cuda": "CUDA",
        "nccl": "NCCL",
        "torch": "PyTorch",
        "triton": "Triton",
        "python": "Python",
    }
    names |= {key: key.capitalize() for key in ("threads", "driver")}
    rows = [(names.get(key, key), str(about[key])) for key in wanted if key in about]
    found = list(all_cells(record)) if isinstance(about["results"], dict) else []  # a list, see `shards_of`
    if "read_TB/s" in about:
        rates = [cell.reference for cell in found if cell.values.get("fraction", 0) > 0.5]  # rounded least
        others = f"; in all runs {min(rates):.2f} to {max(rates):.2f} TB/s" if rates else ""
        rows.append(("Bandwidth of the reference kernel", f"{about['read_TB/s']:.2f} TB/s{others}"))
    if "commit" in about:
        changes = " with uncommitted changes" if about.get("uncommitted_changes") else ""
        number = Counter(cell.commit for cell in found).most_common()
        what = "Commit" if len(number) < 2 else "Last run, of which the above is"
        rows.append((what, f"`{about['commit'][:7]}`{changes}, {about['date']}"))
        if len(number) > 1:
            rows.append(("Results by commit", ", ".join(f"{of} of `{commit}`" for commit, of in number)))
    if "how" in about:
        rows.append(("How", about["how"]))
    return html_table(["", "Measured on"], rows).replace(' class="number"', "")


def verification_table(
    record: str, temperature: str = "0.7", dtype: str = "bfloat16", show: str = "time", only: str = ""
) -> str:
    """Compare providers by the size of the batch."""
    results = cells(record, kind="request", temperature=float(temperature), dtype=dtype)
    if float(temperature) > 0 and dtype == "bfloat16":
        results += [cell for cell in cells(record, kind="request", dtype=dtype) if cell.temperature == 0]
    if only == "package":
        results = [cell for cell in results if is_kernel(cell)]
    results.sort(key=lambda cell: cell.provider in ("eager", "straightforward"))  # the slowest last
    return by_shape(results, "Requests, drafts", SHOWS[show])


def summary_table(record: str, count: str = "128", drafts: str = "3", temperature: str = "0.7") -> str:
    """Compare methods, and PyTorch, for one size of a batch."""
    wanted: dict[str, object] = {
        "count": int(count),
        "drafts": int(drafts),
        "temperature": float(temperature),
        "dtype": "bfloat16",
    }
    found = {cell.provider: cell for cell in cells(record, kind="request", **wanted)}
    first = found["triton"]
    rows = []
    for provider in ("triton", "triton strict", "triton block", "straightforward compiled", "straightforward"):
        cell = found[provider]
        ratio = cell.values["device_us"]["median"] / first.values["device_us"]["median"]
        if is_own(cell):
            one_commit(cell, first)
        rows.append([cell.title, device_time(cell.values) + cell.of_commit, f"{ratio:.1f}{cell.of_commit}"])
    return html_table(["from raw logits to tokens", "µs on the device", f"relative to {first.title}"], rows)


def served_table(record: str, temperature: str = "0.7") -> str:
    """Show steps whose numbers are in tensors."""
    return by_shape(cells(record, kind="served", temperature=float(temperature)), "Requests, drafts", device_time)


def sampling_table(record: str) -> str:
    """Show drafting and plain sampling."""
    return by_shape(cells(record, kind="row"), "Rows", device_time)


def calls_table(record: str) -> str:
    """Show the host time of a call."""
    times = ("call_in_a_row_us", "call_us", "call_and_wait_us")
    rows = [
        (
            "allocations and launches alone" if cell.provider == "nothing" else cell.title,
            *[shown(cell.values[time]["median"]) + cell.of_commit for time in times if time in cell.values],
        )
        for cell in cells(record, kind="call")
    ]
    headings = [
        "One request, 3 drafts",
        "µs each, many in a row",
        "µs alone, until it returns",
        "µs until its result is there",
    ]
    return html_table(headings, rows)


def launches_table(record: str) -> str:
    """Show the time after each launch of a step."""
    rows = []
    for cell in cells(record, kind="launches"):
        what = f"{cell.title}, {cell.count:,}"
        after = [f"`{name.removesuffix('_kernel')}` {us:.1f}{cell.of_commit}" for name, us in cell.values["after_us"]]
        rows.append([what, *after])
    most = max(map(len, rows)) - 1
    headings = ["µs after launch 1", *[f"launch {launch}" for launch in range(2, most + 1)]]
    rows = [[*row, *[""] * (most + 1 - len(row))] for row in rows]
    return html_table(["Method, requests or rows", *headings], rows)


def truncated_table(
    record: str,
    method: str = "probabilistic",
    rows: str = "realistic",
    temperature: str = "0.7",
    vocab: str = "151936",
    beside: str = "",
) -> str:
    """Compare truncated calls with the same call without truncation, and with the engine in `beside`, as `ours / theirs`.

    Without an engine the number in brackets is the time of the call with `draft_logsumexp`.
    """
    results = cells(record, kind="truncated", rows=rows, temperature=float(temperature), vocab=int(vocab))
    times = {(cell.provider, cell.count): device_time(cell.values) + cell.of_commit for cell in results}
    given = " with draft_logsumexp"
    own = [(name.partition(", ")[2], count) for name, count in times if name.startswith(f"{method}, ")]
    titles = list(dict.fromkeys(title for title, _ in own if not title.endswith(given)))
    counts = dict.fromkeys(count for _, count in own)

    def content(count: int, title: str) -> str:
        other = times.get((f"{beside}, {title}" if beside else f"{method}, {title}{given}", count))
        after = "" if other is None else f" / {other}" if beside else f" ({other})"
        return times[f"{method}, {title}", count] + after

    headings = ["no truncation" if title == "plain" else title for title in titles]
    return html_table(
        ["Requests", *headings], [[f"{count:,}", *[content(count, title) for title in titles]] for count in counts]
    )


def adjustments_table(record: str) -> str:
    """Compare steps with kinds of adjustments, as `probabilistic / strict`."""
    results = cells(record, kind="adjustments")
    times = {(cell.provider, cell.count): device_time(cell.values) + cell.of_commit for cell in results}
    found = []
    for (provider, count), time in times.items():
        method, _, kind = provider.partition(", ")
        if method == "probabilistic":
            found.append(((kind,), f"{count:,}", f"{time} / {times[f'strict, {kind}', count]}"))
    return pivot(["Requests"], found)


def packed_table(record: str) -> str:
    """Compare packed calls with the same calls padded."""
    results = cells(record, kind="packed")
    times = {(shape(cell), cell.provider): device_time(cell.values) + cell.of_commit for cell in results}
    found = []
    for cell in results:
        if cell.provider.endswith(", packed"):
            padded = cell._replace(provider=cell.provider.removesuffix(", packed"))
            content = f"{times[shape(cell), cell.provider]} ({times[shape(cell), padded.provider]})"
            found.append(((padded.title,), shape(cell), content))
    return pivot(["Requests, drafts"], found)


def in_vllm_table(record: str, show: str = "device_us") -> str:
    """Compare verifications in vLLM's classes: a row for each number of requests and kind of drafts and truncation."""
    found = []
    for cell in cells(record, kind="in vLLM"):
        provider, _, what = cell.provider.partition(", ")
        title = "vLLM" if provider == "vllm" else f"`{provider}`"
        content = shown(cell.values[show]["median"]) + cell.of_commit
        found.append(((f"{cell.count:,}", what.removesuffix(", plain")), title, content))
    return pivot(["Requests", "Drafts"], found, text_columns=2)


def truncation_in_vllm_table(record: str) -> str:
    """Compare truncated steps in vLLM's classes: a row for each number of requests and temperature, `ours / vLLM's`."""
    times: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in cells(record, kind="truncation in vLLM"):
        provider, _, truncation = cell.provider.partition(", ")
        of = times.setdefault((f"{cell.count:,}", f"{cell.temperature:g}", truncation), {})
        of[provider] = shown(cell.values["device_us"]["median"]) + cell.of_commit
    return pivot(
        ["Requests", "T"],
        [
            (tuple(first), truncation, f"{of['probabilistic']} / {of['vllm']}")
            for (*first, truncation), of in times.items()
        ],
    )


def logprobs_table(record: str, method: str, kind: str = "log-probabilities") -> str:
    """Compare calls that return log-probabilities, or the lists of another `kind`, with the same call without them."""
    found = cells(record, kind=kind, rows="realistic")
    results = [cell for cell in found if cell.provider.rpartition(", ")[0] == method]
    results.sort(key=lambda cell: (cell.count, cell.drafts, cell.temperature))
    numbers = [
        (
            (shape(cell), f"{cell.temperature:g}"),
            cell.provider.rpartition(", ")[2],
            device_time(cell.values) + cell.of_commit,
        )
        for cell in results
    ]
    return pivot(["Requests, drafts", "T"], numbers)


def small_kernels_table(record: str) -> str:
    """Compare the small kernels of `reference/kernels/` with the package's kernels."""
    found = []
    for cell in sorted(cells(record, kind="small kernels"), key=lambda cell: (cell.count, cell.temperature)):
        method, _, way = cell.provider.partition(", ")
        method = method if method == "greedy" else f"`{method}`"
        found.append(((f"{cell.count:,}", method), way, device_time(cell.values) + cell.of_commit))
    return pivot(["requests", "method"], found, text_columns=2)


def tree_times(record: str, groups: str) -> dict[tuple[str, ...], dict[str, str]]:
    """Return the times of a record of trees: by the groups of a pattern, then by provider."""
    found = {}
    for group, providers in load(record)["results"].items():
        if match := re.match(groups, group):
            found[match.groups()] = {
                name: device_time(values) + f"^{values.get('commit', load(record)['commit'])[:7]}^"
                for name, values in providers.items()
            }
    return found


def trees_table(record: str) -> str:
    """Compare verifications of trees, whole rows, then truncated ones."""
    ways = {"tree": "`tree`", "SGLang": "SGLang", "softmax, then walk": "PyTorch"}
    found = tree_times(record, r"trees of (\d+) nodes and depth (\d+), ([\d,]+) requests")
    rows = [
        [
            f"{count}, {nodes}, {depth}",
            *[times.get(f"{way}, {of}", "") for of in ("plain", "top-p .95") for way in ways],
        ]
        for (nodes, depth, count), times in found.items()
    ]
    head = ["Requests, nodes, depth", *ways.values(), *[f"{way}, top-p" for way in ways.values()]]
    return html_table(head, rows)


def siblings_table(record: str, count: str = "256") -> str:
    """Show the drafting of siblings, of whole rows and of truncated ones."""
    widths = "one token", "2 siblings", "4 siblings", "8 siblings"
    times = tree_times(record, f"siblings, ({count}) rows")[count,]
    rows = [
        [title, *[times[width + of] for width in widths]]
        for title, of in (("whole rows", ""), ("top-p .95", ", top-p .95"))
    ]
    return html_table(["", *widths], rows)


def lengths_table(record: str) -> str:
    """Compare planned draft lengths with fixed ones, in seconds."""
    rows = [
        [
            text,
            *[f"{times[way]:.2f}" for way in ("best fixed", "4", "planned")],
            f"{times['planned'] / times['best fixed']:.2f}",
        ]
        for text, times in load(record)["results"].items()
    ]
    return html_table(["models, text", "best fixed length", "4, the default", "planned", "planned / best fixed"], rows)


def share_table(record: str, billions: str, terabytes: str, teraflops: str, temperature: str = "0.7") -> str:
    """Compare verification with the least time of the target's call: reading the weights, or computing with them.

    The target has `billions` of weights of 2 bytes each; the GPU reads `terabytes` and computes `teraflops` per second.
    """
    results = cells(record, kind="request", temperature=float(temperature), dtype="bfloat16")
    titles = {cell.provider: cell.title for cell in results if cell.provider in SHARES}
    rows: dict[tuple[int, int], dict[str, Cell]] = {}
    for cell in results:
        if cell.provider in titles:
            rows.setdefault((cell.count, cell.drafts), {})[cell.provider] = cell
    lines = []
    for (count, drafts), by_provider in rows.items():
        least = least_time(float(billions), float(terabytes), float(teraflops), count * (drafts + 1))
        times = {name: cell.values["device_us"]["median"] for name, cell in by_provider.items()}
        shares = {name: f"{us / (us + least):.1%}{by_provider[name].of_commit}" for name, us in times.items()}
        lines.append([f"{count:,}, {drafts}", f"{least / 1000:.1f}", *[shares.get(name, "") for name in titles]])
    return html_table(["Requests, drafts", "target, at least: ms", *titles.values()], lines)


SHARES = "triton", "vllm", "straightforward compiled"
"""The providers whose share of a decoding step is shown."""


def growth_table(record: str, few: str = "128", many: str = "256", drafts: str = "3") -> str:
    """Split the time of a large batch into a part that grows with the batch and a constant part."""
    rows = []
    found = cells(record, kind="request", temperature=0.7, dtype="bfloat16", drafts=int(drafts))
    by_count = {(cell.title, cell.count): cell for cell in found if is_kernel(cell)}
    for title in dict.fromkeys(title for title, _ in by_count):
        cell = one_commit(by_count[title, int(many)], by_count[title, int(few)])
        small, large = by_count[title, int(few)].values, cell.values
        more = large["device_us"]["median"] - small["device_us"]["median"]
        fixed = large["device_us"]["median"] - more * int(many) / (int(many) - int(few))
        reading = 1000 * (large["GB"] - small["GB"]) / cell.reference
        rows.append([title, *[f"{us:.0f}{cell.of_commit}" for us in (more, reading, fixed)]])
    added = f"{int(many) - int(few)} more requests"
    return html_table(
        ["", f"{added}, µs", "their bytes at the reference bandwidth, µs", "extrapolated to 0 requests, µs"], rows
    )


def added(steps: list[tuple[str, str, list[float]]], columns: list[Cell]) -> list[list[str]]:
    """Return the rows of a table: the time that each step adds to the previous one, and the last times as the sum."""
    rows, before = [], [0.0] * len(columns)
    for hypothesis, change, times in steps:
        texts = [f"{time - last:+.1f}" if rows else shown(time) for time, last in zip(times, before)]
        rows.append([hypothesis, change, *texts])
        before = times
    rows.append(["sum", "", *map(shown, before)])
    return [[*row[:2], *[text + cell.of_commit for text, cell in zip(row[2:], columns)]] for row in rows]


READING = {
    "floor": ("bytes", "no launch: the needed bytes / the reference bandwidth"),
    "plain": ("start and end of a launch", "a plain kernel that reads as many bytes from one array"),
    "told in advance": (
        "addresses, exponentials",
        "add: find rows, write statistics; drafts end at the first rejected row, so the needed rows are known",
    ),
    "publishes nothing": (
        "bookkeeping",
        "add: check whether the row still matters, count programs (no count completes)",
    ),
    "decides nothing": (
        "visibility of writes",
        "add: wait until a program's writes are visible before it is counted",
    ),
    "as it is": (
        "decisions",
        "`read_kernel` as it is: the last program of a row decides, some rows are read needlessly",
    ),
    "step": ("the token", "the whole step: draw the token, write the output"),
}
"""By the record's name of each time: the cost that it includes, and the run that measures it."""


def reading_table(record: str) -> str:
    """Compare the launch that reads with simpler ones; each does one thing more than the previous one."""
    results = cells(record, kind="reading")
    columns = [
        {
            **cell.values["reading_us"],
            "floor": 1000 * cell.values["GB"] / cell.reference,
            "step": cell.values["device_us"]["median"],
        }
        for cell in results
    ]
    steps = [(*texts, [column[name] for column in columns]) for name, texts in READING.items()]
    every_row = ["for comparison", "`read_kernel` reads every row and decides nothing"]
    alone = [shown(column["every row"]) + cell.of_commit for column, cell in zip(columns, results)]
    rows = [*added(steps, results), [*every_row, *alone]]
    headings = [f"{cell.title}, {shape(cell)}" for cell in results]
    rows = [[f"{hypothesis}: {change}" if change else hypothesis, *times] for hypothesis, change, *times in rows]
    return html_table(["Hypothesis: time goes into", *headings], rows, text_columns=1)


def cpu_table(record: str, dtype: str) -> str:
    """Compare providers on a CPU, in milliseconds."""
    results = cells(record, kind="request", dtype=dtype)
    return by_shape(results, "Requests, drafts", lambda values: f"{values['median'] / 1000:.2f}")


def is_kernel(cell: Cell) -> bool:
    """Return whether a result is of this package's kernels."""
    return cell.provider.startswith("triton")


def is_own(cell: Cell) -> bool:
    """Return whether a result is of this package's code, in any backend."""
    return not cell.provider.lower().startswith(("straightforward", "vllm", "sglang", "flashinfer"))


def roofline_plot(record: str) -> str:
    """Plot the time of a step against the bytes that its outcome needs, with the time of the reference kernel."""
    by_provider: dict[str, list[tuple[float, float]]] = {}
    for cell in cells(record, kind="request", dtype="bfloat16"):
        if "GB" in cell.values:
            point = (1000 * cell.values["GB"], cell.values["device_us"]["median"])
            by_provider.setdefault(cell.title + cell.of_commit, []).append(point)
    rate = load(record)["read_TB/s"]
    sizes = sorted(x for points in by_provider.values() for x, _ in points)
    limit = [(x, x / rate) for x in (sizes[0], sizes[-1])]
    series = [Series(f"reference kernel, {rate:.2f} TB/s", "s0", limit, mark=False)]
    titles, commits = with_marks(title.replace("`", "") for title in by_provider)
    series += [
        Series(title, f"s{i % 12 + 1}", sorted(points), line=False)
        for i, (title, points) in enumerate(zip(titles, by_provider.values()))
    ]
    picture = plot(
        series, "megabytes that must be read", "microseconds on the device", "Time against bytes", height=340
    )
    return picture + commits


def engines_plot(record: str, requests: str, temperature: str = "0.7", drafts: str = "3") -> str:
    """Draw the time of a step in this package, in engines and in PyTorch as bars, for some sizes of a batch."""
    providers = ("triton", "triton with draft_logsumexp", "vllm", "flashinfer", "sglang", "straightforward compiled")
    results = cells(record, kind="request", temperature=float(temperature), drafts=int(drafts))
    found = {(cell.count, cell.provider): cell for cell in results}
    groups = []
    for count in map(int, requests.split()):
        group = [found[count, provider] for provider in providers]
        times = [cell.values["device_us"]["median"] for cell in group]
        groups.append((f"{count:,} requests of {drafts} drafts", list(zip(group, times))))
    return bars_of(groups, "Time of one verification step", "microseconds on the device", lambda us: f"{shown(us)} µs")


def share_plot(record: str, billions: str, terabytes: str, teraflops: str, requests: str) -> str:
    """Draw the share of verification in a step as bars, see `share_table`."""
    groups = []
    for count in map(int, requests.split()):
        wanted: dict[str, object] = {"kind": "request", "temperature": 0.7, "drafts": 3, "count": count}
        found = {cell.provider: cell for cell in cells(record, dtype="bfloat16", **wanted)}
        group = [found[name] for name in SHARES if name in found]
        least = least_time(float(billions), float(terabytes), float(teraflops), 4 * count)
        times = [cell.values["device_us"]["median"] for cell in group]
        shares = [(cell, us / (us + least)) for cell, us in zip(group, times)]
        groups.append((f"{count:,} request{'s' * (count > 1)} of 3 drafts", shares))
    return bars_of(groups, "Share of verification in a step", "share of a step", "{:.1%}".format)


def bars_of(
    groups: list[tuple[str, list[tuple[Cell, float]]]], title: str, unit: str, show: Callable[[float], str]
) -> str:
    """Return bars of cells and their numbers, and the line of their commits."""
    numbers = [show(value) + cell.of_commit for _, group in groups for cell, value in group]
    texts, commits = with_marks(numbers)
    marked = iter(texts)
    drawn = [
        (heading, [Bar(bar_title(cell), value, next(marked), is_own(cell)) for cell, value in group])
        for heading, group in groups
    ]
    return bars(drawn, title, unit) + commits


def bar_title(cell: Cell) -> str:
    """Return a cell's name in one short line."""
    return cell.title.replace("`", "").replace("probabilistic, draft", "with draft")


def least_time(billions: float, terabytes: float, teraflops: float, rows: int) -> float:
    """Return the least microseconds of the target's call: to read its weights, or to compute with them."""
    return max(2e9 * billions / (1e6 * terabytes), 2e9 * billions * rows / (1e6 * teraflops))


SHOWS = {"time": device_time, "bandwidth": bandwidth, "bytes": megabytes}


def of_commit(record: str) -> str:
    """Return the commit mark after a number of a record with one commit, see `with_marks`."""
    return f"^{load(record)['commit'][:7]}^"


def shards_of(record: str, method: str) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """Return the results of a method over shards, by number of requests and drafts and by way to verify."""
    shapes: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for result in load(record)["results"]:
        if result["method"] == method:
            shapes.setdefault((result["batch"], result["drafts"]), {})[result["way"]] = result
    if not shapes:
        raise LookupError(f"no method {method!r}")
    return shapes


SHARD_WAYS = {
    "one GPU": "whole rows, one GPU",
    "gather": "gather",
    "gather, whole draft rows": "gather; whole draft rows",
    "exchange": "exchange: `VocabShard`",
    "exchange, whole draft rows": "exchange: `VocabShard`; whole draft rows",
}


def shards_table(record: str, method: str, removed: str = "") -> str:
    """Compare the ways to verify on several ranks: a row for each, a column for each number of requests and drafts.

    The last row has the removed kernels over shards, from a record of a commit that had them.
    """
    shapes = shards_of(record, method)
    rows = [
        [title, *[shown(ways[way]["us"]) + of_commit(record) if way in ways else "" for ways in shapes.values()]]
        for way, title in SHARD_WAYS.items()
        if any(way in ways for ways in shapes.values())
    ]
    if removed:
        before = shards_of(removed, method)
        times = [before[shape]["shards, triton, symmetric_memory"]["us"] for shape in shapes]
        rows.append(["kernels over shards, removed", *[shown(us) + of_commit(removed) for us in times]])
    return html_table(["Requests, drafts", *[f"{batch:,}, {drafts}" for batch, drafts in shapes]], rows)


TABLES: dict[str, Callable[..., str]] = {
    "environment": environment_table,
    "verification": verification_table,
    "summary": summary_table,
    "served": served_table,
    "truncated": truncated_table,
    "adjustments": adjustments_table,
    "packed": packed_table,
    "in vLLM": in_vllm_table,
    "truncation in vLLM": truncation_in_vllm_table,
    "log-probabilities": logprobs_table,
    "sampling": sampling_table,
    "calls": calls_table,
    "launches": launches_table,
    "share": share_table,
    "growth": growth_table,
    "reading": reading_table,
    "cpu": cpu_table,
    "shards": shards_table,
    "small kernels": small_kernels_table,
    "trees": trees_table,
    "siblings": siblings_table,
    "lengths": lengths_table,
}

PLOTS: dict[str, Callable[..., str]] = {
    "roofline": roofline_plot,
    "engines": engines_plot,
    "share": share_plot,
}
