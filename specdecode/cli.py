"""The command line: `specdecode demo`, `specdecode generate` and `specdecode solve`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

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
from specdecode.sampler import Method, RejectionSampler
from specdecode.synthetic import AcceptanceSchedule, Shape

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
"""How a token shows what it is on a terminal with colours, and in a file or on a terminal without."""

BAR_WIDTH = 36


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    options = parser().parse_args(arguments)
    try:
        options.run(options, Console(highlight=False))
    except (ValueError, OSError) as error:
        Console(stderr=True, highlight=False).print(f"specdecode: {error}", markup=False)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="specdecode", description="Verification for speculative decoding.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="compare the methods on two small models, or on yours")
    add_model_options(demo)
    demo.add_argument("--prompt", action="append", help="may be repeated; default: a few that start Python code")
    demo.add_argument("--max-new-tokens", type=int, default=128, help="per prompt (default %(default)s)")
    demo.set_defaults(run=run_demo)

    generate = commands.add_parser("generate", help="continue a prompt, showing what became of each draft")
    add_model_options(generate)
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--max-new-tokens", type=int, default=200, help="default %(default)s")
    methods = [method for method in get_args(Method) if method != "synthetic"]
    generate.add_argument("--method", choices=methods, default="probabilistic", help="default %(default)s")
    generate.add_argument(
        "--prompt-lookup", action="store_true", help="draft from the text so far, without a draft model"
    )
    generate.set_defaults(run=run_generate)

    solve = commands.add_parser("solve", help="show the schedule of synthetic acceptance for a mean rate or length")
    goal = solve.add_mutually_exclusive_group(required=True)
    goal.add_argument("--rate", type=float, help="mean joint acceptance rate, in [0, 1]")
    goal.add_argument("--length", type=float, help="mean emitted tokens per step, in [1, drafts + 1]")
    solve.add_argument("--drafts", type=int, required=True, help="draft tokens per step")
    solve.add_argument(
        "--shape", choices=get_args(Shape), help="default: decay for a rate, minimum_variance for a length"
    )
    solve.add_argument("--min-decay", type=float, default=0.85, help="default %(default)s")
    solve.set_defaults(run=run_solve)
    return top


def add_model_options(command: argparse.ArgumentParser) -> None:
    """Add what `demo` and `generate` share."""
    command.add_argument(
        "--target", type=Path, default=TARGET, help="folder of the target model (default: the one shipped)"
    )
    command.add_argument(
        "--draft", type=Path, help="folder of the draft model (default: the one shipped, for its target)"
    )
    command.add_argument("--drafts", type=int, default=3, help="draft tokens per step (default %(default)s)")
    command.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default %(default)s)")
    command.add_argument("--seed", type=int, default=0, help="default %(default)s")


@dataclass
class Models:
    """A target, its draft and their tokenizer."""

    target: Any
    draft: Any
    tokenizer: Any

    @classmethod
    def load(cls, target: Path, draft: Path | None, needs_draft: bool = True) -> Models:
        """Load from folders in Hugging Face format.

        Raises:
            ValueError: transformers is not installed, or there is no draft model.
            OSError: a folder holds no model.
        """
        try:
            transformers: Any = import_module("transformers")
        except ImportError:
            raise ValueError("this command needs transformers: pip install 'specdecode[demo]'") from None
        if draft is None and target == TARGET:
            draft = DRAFT
        if draft is None and needs_draft:
            raise ValueError("--draft: expected a folder, as --target is given")
        transformers.utils.logging.disable_progress_bar()
        if target == TARGET:
            torch.set_num_threads(1)  # a model this small only waits for its threads

        def load(folder: Path) -> Any:
            if not (folder / "config.json").is_file():
                raise ValueError(
                    f"--target, --draft: expected a folder with a model in Hugging Face format, got {folder}"
                )
            return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

        models = load(target), load(draft) if draft else None
        return cls(*models, transformers.AutoTokenizer.from_pretrained(target))

    def encode(self, prompt: str) -> torch.Tensor:
        """Return [1, tokens] int64.

        Raises:
            ValueError: the prompt has no tokens.
        """
        token_ids: torch.Tensor = self.tokenizer(prompt, return_tensors="pt").input_ids.to(torch.int64)
        if token_ids.shape[1] == 0:
            raise ValueError(f"--prompt: expected at least one token, got {prompt!r}")
        return token_ids


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


def run_generate(options: argparse.Namespace, console: Console) -> None:
    """Continue a prompt and stream what each step gives."""
    models = Models.load(options.target, options.draft, needs_draft=not options.prompt_lookup)
    from specdecode.integrations.transformers import PromptLookup, generate

    started = False

    def stream(step: Step) -> None:
        nonlocal started
        if not started:  # only now are the arguments known to be good
            console.print(legend(console), end="\n\n")
            console.print(Text(options.prompt, style="dim"), end="", soft_wrap=True)
            started = True
        console.print(show(models, step, console), end="", soft_wrap=True)

    output = generate(
        models.target,
        PromptLookup() if options.prompt_lookup else models.draft,
        models.encode(options.prompt),
        method=options.method,
        num_draft_tokens=options.drafts,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seeds=options.seed,
        on_step=stream,
    )
    console.print("\n")
    console.print(str(output.stats), markup=False)


class MeasuredBlock(RejectionSampler):
    """Block verification that notes how many more drafts than token verification it accepts, in the mean given the drafts.

    Given the first i drafts, block verification accepts them with their running ratio c_i = min(1, c_{i-1} r_i), r_i = p / q
    of draft i, and token verification with the product of the min(1, r_i). The sum of the differences over i has the gain in
    accepted length as its mean, and varies far less than two accepted lengths do.
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
        """Verify as ever."""
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
    """Return a mean and its standard error, the numbers taken as independent; NaN where there are too few.

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


def run_demo(options: argparse.Namespace, console: Console) -> None:
    """Generate with every method, show the text of one of them, and compare them in a table."""
    models = Models.load(options.target, options.draft)
    from specdecode.integrations.transformers import PromptLookup, generate

    schedule = AcceptanceSchedule.from_mean_rate(0.69, num_draft_tokens=options.drafts)
    synthetic = RejectionSampler("synthetic", schedule=schedule)
    strict, probabilistic, block = RejectionSampler("strict"), RejectionSampler("probabilistic"), MeasuredBlock()
    rows = [
        ("plain", None, None, options.temperature),
        ("strict", strict, models.draft, options.temperature),
        ("probabilistic", probabilistic, models.draft, options.temperature),
        ("block", block, models.draft, options.temperature),
        ("greedy", strict, models.draft, 0.0),
        ("prompt lookup", strict, PromptLookup(), options.temperature),
        ("synthetic", synthetic, models.draft, options.temperature),
    ]
    trials = [Trial(*row, outputs=[], steps=[]) for row in rows]
    prompts = [models.encode(prompt) for prompt in options.prompt or DEMO_PROMPTS]

    def run(trial: Trial, prompt: torch.Tensor, seed: int, max_new_tokens: int) -> GenerationOutput:
        return generate(
            models.target,
            trial.drafter,
            prompt,
            method=trial.sampler or "strict",
            num_draft_tokens=options.drafts,
            max_new_tokens=max_new_tokens,
            temperature=trial.temperature,
            seeds=seed,
            eos_token_id=[],  # every trial is to say equally many tokens
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
    console.print(f"[bold]{shown.name}[/bold], temperature {options.temperature:g}, {options.drafts} drafts a step")
    console.print(legend(console), end="\n\n")
    text = Text().append(models.tokenizer.decode(prompts[0][0]), style="dim")
    for step in shown.steps:
        if step.request == options.seed:
            text.append_text(show(models, step, console))
    console.print(text, end="\n\n", soft_wrap=True)

    plain = trials[0]
    console.print(comparison(trials, options.drafts, {"block": block.gain()}))
    same = sum(
        torch.equal(strict_output.sequences, plain_output.sequences)
        for strict_output, plain_output in zip(trials[1].outputs, plain.outputs)
    )
    verdict = "identical to" if same == len(prompts) else f"NOT identical to ({len(prompts) - same} texts differ)"
    console.print(f"strict was {verdict} plain decoding, token for token ({len(prompts)} texts, {plain.tokens} tokens)")
    console.print(
        "rate: accepted of drafted tokens, in %; length: tokens emitted per draft\n"
        "gain: in length, of block over probabilistic on the same drafts, with its\n"
        "standard error (the texts of two rows differ, and so do their lengths)\n"
        "positions: drafts accepted through the 1st, 2nd, ... token, in %\n"
        "calls: of the target; speed: against plain decoding\n"
        "prompt lookup: strict, with drafts from the text so far instead of a model\n"
        "synthetic: accepts by a schedule of mean rate 0.69, whatever the models say",
        style="dim",
    )


def comparison(trials: Sequence[Trial], num_draft_tokens: int, gains: dict[str, tuple[float, float]]) -> Table:
    """Return the table over the methods; `gains` has those that are known, with their standard errors."""
    plain = trials[0]
    table = Table(
        title=f"{num_draft_tokens} drafts a step, {plain.tokens} tokens per row", box=SIMPLE, padding=(0, 1, 0, 0)
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


def run_solve(options: argparse.Namespace, console: Console) -> None:
    """Print the schedule that reaches a mean rate or length."""
    limits = {"num_draft_tokens": options.drafts, "min_decay": options.min_decay}
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
    table.add_column("this draft and all before it stand")
    for position, (conditional, joint) in enumerate(zip(schedule.conditional_rates, schedule.joint_rates), 1):
        bar = "\u2588" * round(BAR_WIDTH * joint)
        table.add_row(str(position), f"{conditional:.6f}", f"{joint:.6f}", bar)
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
