"""What the commands of the command line do."""

from __future__ import annotations

import math
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby, takewhile
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch

try:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError:
    raise SystemExit("specdecode: the command line needs rich: pip install 'specdecode[cli]'") from None

from specdecode.batch import SamplerOutput
from specdecode.demo import DRAFT, TARGET
from specdecode.metrics import AcceptanceStats
from specdecode.sampler import RejectionSampler
from specdecode.synthetic import AcceptanceSchedule

if TYPE_CHECKING:
    from specdecode.integrations.transformers import GenerationOutput, Step

DEMO_PROMPTS = (
    "class Message:\n    def __init__(self",
    'def read_file(path):\n    """',
    "class HTTPServer(",
    "async def connect(self,",
    "def get_encoding(filename, default=None):\n",
    "class Lock:\n",
)

STYLES = {"accepted": "green", "recovered": "bold red", "bonus": "bold cyan", "plain": "yellow"}
MARKS = {"accepted": "{}", "recovered": "[-{}-]", "bonus": "{{+{}+}}", "plain": "[={}=]"}
"""How the kind of a token is shown: by a colour where the console has colours, elsewhere by marks."""

BAR_WIDTH = 36

MEAN_RATE = 0.69
"""Of the demo's synthetic acceptance."""

EXPLANATION = f"""\
rate: accepted of drafted tokens, in %; length: tokens emitted per draft
gain: in length, of block over probabilistic on the same drafts, with its
standard error (the rows have different texts, so their lengths differ too)
positions: drafts accepted through the 1st, 2nd, ... token, in %
calls: of the target; speed: relative to plain decoding
prompt lookup: strict, with drafts from the text so far instead of a model
synthetic: accepts by a schedule of mean rate {MEAN_RATE}, whatever the logits are"""


def make_console() -> Console:
    """Return a console for standard output; with NO_COLOR set it writes no escape sequences at all."""
    if os.environ.get("NO_COLOR"):
        return Console(highlight=False, color_system=None, force_terminal=False)
    return Console(highlight=False)


@dataclass
class Models:
    """A target, its draft and their tokenizer."""

    target: Any
    draft: Any
    tokenizer: Any

    @classmethod
    def load(cls, target: Path, draft: Path | None, device: str, needs_draft: bool = True) -> Models:
        """Load from folders in Hugging Face format.

        Raises:
            ValueError: transformers is not installed, there is no draft model, a folder has no model that can be loaded, or
                there is no such device.
        """
        try:
            transformers: Any = import_module("transformers")
        except ImportError:
            raise ValueError("this command needs transformers: pip install 'specdecode[demo]'") from None
        if draft is None and target == TARGET:
            draft = DRAFT
        if draft is None and needs_draft:
            raise ValueError("--draft: expected a folder, because --target is given")
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError):  # PyTorch without CUDA fails an assertion
            raise ValueError(f"--device: expected a device that PyTorch can use here, got {device!r}") from None
        transformers.utils.logging.disable_progress_bar()
        if target == TARGET:
            torch.set_num_threads(1)  # more threads make a model this small slower

        def load(option: str, folder: Path) -> Any:
            model = load_from(folder, option, transformers.AutoModelForCausalLM, dtype=torch.float32)
            return model.eval().to(device)

        return cls(
            load("--target", target),
            None if draft is None else load("--draft", draft),
            load_from(target, "--target", transformers.AutoTokenizer),
        )

    def encode(self, prompt: str) -> torch.Tensor:
        """Return [1, tokens] int64.

        Raises:
            ValueError: the prompt has no tokens.
        """
        token_ids: torch.Tensor = self.tokenizer(prompt, return_tensors="pt").input_ids.to(torch.int64)
        if token_ids.shape[1] == 0:
            raise ValueError(f"--prompt: expected at least one token, got {prompt!r}")
        return token_ids


def load_from(folder: Path, option: str, loader: Any, **options: Any) -> Any:
    """Return what a class of transformers loads from a folder.

    Raises:
        ValueError: it cannot, for whatever reason; the message names the option that gave the folder.
    """
    try:
        if not (folder / "config.json").is_file():
            raise FileNotFoundError("it has no config.json")
        return loader.from_pretrained(folder, **options)
    except Exception as error:  # a broken file can raise anything
        reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 200, placeholder="...")
        raise ValueError(
            f"{option}: expected a folder with a model in Hugging Face format, got {folder}: {reason}"
        ) from error


def show(models: Models, step: Step, console: Console) -> Text:
    """Return the text of a step's tokens, each run of a kind in its colour or between its marks."""
    text = Text()
    for kind, pairs in groupby(zip(step.kinds, step.token_ids), key=lambda pair: pair[0].name.lower()):
        run = models.tokenizer.decode([token for _, token in pairs])
        if console.color_system is None:
            text.append(MARKS[kind].format(run))
        else:
            text.append(run, style=STYLES[kind])
    return text


def legend(console: Console) -> Text:
    """Return one line that explains the colours or marks."""
    text = Text()
    for kind, style in STYLES.items():
        label = "nothing drafted" if kind == "plain" else f"{kind} token"
        text.append(MARKS[kind].format(label) if console.color_system is None else label, style=style).append("   ")
    return text


def run_generate(options: Namespace, console: Console) -> None:
    """Continue a prompt and print the tokens of each step as soon as they are known."""
    models = Models.load(options.target, options.draft, options.device, needs_draft=not options.prompt_lookup)
    from specdecode.integrations.transformers import PromptLookup, generate

    started = False

    def stream(step: Step) -> None:
        nonlocal started
        if not started:  # only now is it known that the arguments are valid
            console.print(legend(console), end="\n\n")
            console.print(Text(options.prompt, style="dim"), end="", soft_wrap=True)
            started = True
        console.print(show(models, step, console), end="", soft_wrap=True)

    output = generate(
        models.target,
        PromptLookup() if options.prompt_lookup else models.draft,
        models.encode(options.prompt),
        method=options.method,
        num_draft_tokens=options.num_draft_tokens,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seeds=options.seed,
        on_step=stream,
    )
    console.print("\n")
    console.print(str(output.stats), markup=False)


class MeasuredBlock(RejectionSampler):
    """Block verification that records how many more drafts it accepts, on average, than `probabilistic` would accept.

    Let r_i = p / q of draft i. Given the first i drafts, block verification accepts them all with the probability
    c_i = min(1, c_{i-1} r_i), their running ratio, and `probabilistic` with the product of min(1, r_1), ..., min(1, r_i).
    The sum over i of the differences has the gain in accepted length as its mean, and varies far less than the accepted
    lengths do.
    """

    def __init__(self) -> None:
        super().__init__("block")
        self.gains: list[float] = []

    def __call__(
        self,
        target_logits: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_logits: torch.Tensor | None = None,
        **options: Any,
    ) -> SamplerOutput:
        """Verify one step of drafts, and record the gain."""
        if draft_logits is not None and options["temperature"] > 0:
            token_ids = draft_token_ids.clamp(min=0)[:, :, None]
            log_p, log_q = (
                (logits.double() / options["temperature"]).log_softmax(dim=2).gather(2, token_ids)[:, :, 0]
                for logits in (target_logits[:, :-1], draft_logits)
            )
            for ids, ratios in zip(draft_token_ids.tolist(), (log_p - log_q).exp().tolist()):
                by_blocks = by_tokens = 1.0
                gain = 0.0
                for _, ratio in takewhile(lambda draft: draft[0] >= 0, zip(ids, ratios)):
                    by_blocks, by_tokens = min(1.0, by_blocks * ratio), by_tokens * min(1.0, ratio)
                    gain += by_blocks - by_tokens
                if ids[0] >= 0:
                    self.gains.append(gain)
        return super().__call__(target_logits, draft_token_ids, draft_logits, **options)

    def gain(self) -> tuple[float, float]:
        """Return the mean gain in accepted length, and its standard error."""
        return mean_and_error(self.gains)


def mean_and_error(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the mean of independent numbers and its standard error; NaN where there are too few.

    >>> mean_and_error([1.0, 2.0, 3.0, 2.0])
    (2.0, 0.408248290463863)
    """
    count = len(numbers)
    if count < 2:
        return (numbers[0] if numbers else math.nan), math.nan
    mean = sum(numbers) / count
    return mean, math.sqrt(sum((number - mean) ** 2 for number in numbers) / (count * (count - 1)))


@dataclass
class Trial:
    """One row of the demo's table."""

    name: str
    sampler: RejectionSampler | None
    drafter: Any
    temperature: float
    outputs: list[GenerationOutput]
    steps: list[Step]
    seconds: float = 0.0

    @property
    def tokens(self) -> int:
        """New tokens over all prompts."""
        return sum(int(output.num_generated.sum()) for output in self.outputs)

    @property
    def target_calls(self) -> int:
        """Forward passes of the target over all prompts."""
        return sum(output.target_calls for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time."""
        return self.tokens / self.seconds

    def stats(self) -> AcceptanceStats | None:
        """Return acceptance over all prompts, None for plain decoding."""
        total: AcceptanceStats | None = None
        for output in self.outputs:
            if output.stats is not None:
                total = output.stats if total is None else total + output.stats
        return total


def run_demo(options: Namespace, console: Console) -> None:
    """Generate with every method, show the text of one of them, and compare them in a table."""
    models = Models.load(options.target, options.draft, options.device)
    from specdecode.integrations.transformers import generate

    block = MeasuredBlock()
    trials = make_trials(models.draft, block, options.num_draft_tokens, options.temperature)
    prompts = [models.encode(prompt) for prompt in options.prompt or DEMO_PROMPTS]

    def run(trial: Trial, prompt: torch.Tensor, seed: int, max_new_tokens: int) -> GenerationOutput:
        return generate(
            models.target,
            trial.drafter,
            prompt,
            method=trial.sampler or "strict",
            num_draft_tokens=options.num_draft_tokens,
            max_new_tokens=max_new_tokens,
            temperature=trial.temperature,
            seeds=seed,
            eos_token_id=[],  # so that every trial generates equally many tokens
            on_step=lambda step: trial.steps.append(step._replace(request=seed)),
        )

    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        for trial in trials:
            run(trial, prompts[0], 0, min(8, options.max_new_tokens))  # the first calls of a model are slow
            trial.steps.clear()
            if trial.sampler is block:
                block.gains.clear()
            for seed, prompt in progress.track(list(enumerate(prompts, options.seed)), description=trial.name):
                start = time.perf_counter()
                trial.outputs.append(run(trial, prompt, seed, options.max_new_tokens))
                trial.seconds += time.perf_counter() - start

    shown = trials[2]
    console.print(
        f"[bold]{shown.name}[/bold], temperature {options.temperature:g}, {options.num_draft_tokens} drafts per step"
    )
    console.print(legend(console), end="\n\n")
    text = Text().append(models.tokenizer.decode(prompts[0][0]), style="dim")
    for step in shown.steps:
        if step.request == options.seed:
            text.append_text(show(models, step, console))
    console.print(text, end="\n\n", soft_wrap=True)

    plain = trials[0]
    console.print(comparison(trials, options.num_draft_tokens, {"block": block.gain()}))
    same = sum(
        torch.equal(strict_output.sequences, plain_output.sequences)
        for strict_output, plain_output in zip(trials[1].outputs, plain.outputs)
    )
    relation = "identical to" if same == len(prompts) else f"NOT identical to ({len(prompts) - same} texts differ)"
    console.print(
        f"strict was {relation} plain decoding, token for token ({len(prompts)} texts, {plain.tokens} tokens)"
    )
    console.print(EXPLANATION, style="dim")


def make_trials(draft: Any, block: MeasuredBlock, num_draft_tokens: int, temperature: float) -> list[Trial]:
    """Return the demo's trials, none of which has run."""
    from specdecode.integrations.transformers import PromptLookup

    schedule = AcceptanceSchedule.from_mean_rate(MEAN_RATE, num_draft_tokens=num_draft_tokens)
    synthetic = RejectionSampler("synthetic", schedule=schedule)
    strict, probabilistic = RejectionSampler("strict"), RejectionSampler("probabilistic")
    rows = [
        ("plain", None, None, temperature),
        ("strict", strict, draft, temperature),
        ("probabilistic", probabilistic, draft, temperature),
        ("block", block, draft, temperature),
        ("greedy", strict, draft, 0.0),
        ("prompt lookup", strict, PromptLookup(), temperature),
        ("synthetic", synthetic, draft, temperature),
    ]
    return [Trial(*row, outputs=[], steps=[]) for row in rows]


def comparison(trials: Sequence[Trial], num_draft_tokens: int, gains: dict[str, tuple[float, float]]) -> Table:
    """Return the table of all trials; `gains` holds the known gains by the trial's name, with standard errors."""
    plain = trials[0]
    table = Table(
        title=f"{num_draft_tokens} drafts per step, {plain.tokens} tokens per row", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    for heading in ("method", "rate", "length", "gain", "positions", "calls", "tokens/s", "speed"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for trial in trials:
        stats = trial.stats()
        acceptance = ("", "", "", "")
        if stats is not None:
            positions = " ".join(f"{100 * rate:.0f}" for rate in stats.per_position)
            gain, error = gains.get(trial.name, (math.nan, math.nan))
            shown = "" if math.isnan(gain) else f"{gain:.3f}±{error:.3f}"
            acceptance = (f"{100 * stats.acceptance_rate:.1f}", f"{stats.acceptance_length:.2f}", shown, positions)
        speed = trial.tokens_per_second
        ratio = f"{speed / plain.tokens_per_second:.2f}x"
        table.add_row(trial.name, *acceptance, str(trial.target_calls), f"{speed:.0f}", ratio)
    return table


def run_solve(options: Namespace, console: Console) -> None:
    """Print the schedule that reaches a mean rate or length."""
    limits = {"num_draft_tokens": options.num_draft_tokens, "min_decay": options.min_decay}
    if options.shape is not None:
        limits["shape"] = options.shape
    if options.rate is not None:
        schedule = AcceptanceSchedule.from_mean_rate(options.rate, **limits)
    else:
        schedule = AcceptanceSchedule.from_length(options.length, **limits)
    if schedule.base_rate is not None and schedule.decay is not None:
        console.print(f"base rate {schedule.base_rate:.6f}   decay {schedule.decay:.6f}")
    console.print(f"mean rate {schedule.mean_rate:.6f}   acceptance length {schedule.acceptance_length:.4f}")
    table = Table(box=SIMPLE)
    for heading in ("draft", "conditional", "joint"):
        table.add_column(heading, justify="right")
    table.add_column("this draft and all before it accepted")
    for position, (conditional, joint) in enumerate(zip(schedule.conditional_rates, schedule.joint_rates), 1):
        bar = "\u2588" * round(BAR_WIDTH * joint)
        table.add_row(str(position), f"{conditional:.6f}", f"{joint:.6f}", bar)
    console.print(table)
