"""The commands of the command line."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import groupby
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
from specdecode.checks import check_count
from specdecode.demo import DRAFT, TARGET
from specdecode.drafting import DraftOutput
from specdecode.sampler import RejectionSampler
from specdecode.sampling import Sampling, check_share, check_temperature
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
"""The mean rate of the demo's synthetic acceptance."""

TEXTS = 8
"""How many texts the demo generates for each prompt."""

SEEDS = 4
"""The number of seeds with which each method decides on a step's drafts. (`strict` has one: that of the drafts.)"""

SHOWN_TOKENS = 64
"""How much of one text the demo shows."""

EXPLANATION = f"""\
first four rows: strict generated the texts; all four decided on its drafts
accepted per step: drafts, on average
vs probabilistic: the difference, with its standard error over the steps
accepted through draft: share of steps that accepted it and all before it
calls saved: a call of the target gives 1 + accepted tokens instead of 1
synthetic: accepts by a schedule of mean rate {MEAN_RATE}, whatever the logits are
prompt lookup: strict, with drafts from the text so far, where it has any
greedy: drafts and target at temperature 0"""


def make_console() -> Console:
    """Return a console for standard output; with NO_COLOR set it writes no escape sequences at all."""
    if os.environ.get("NO_COLOR"):
        return Console(highlight=False, color_system=None, force_terminal=False)
    return Console(highlight=False)


def sampling_of(options: Namespace) -> Sampling:
    """Return how tokens are to be drawn, checked before the models are loaded.

    Raises:
        ValueError: a value is out of range; the message names the option.
    """
    batch, device = 1, torch.device("cpu")  # of tensors, which the options are not
    check_temperature(options.temperature, batch, device, of="--")
    if options.top_k is not None:
        check_count("--top-k", options.top_k, least=0)
    check_share("--top-p", options.top_p, batch, device, neutral=1)
    check_share("--min-p", options.min_p, batch, device, neutral=0)
    return Sampling(options.temperature, options.top_k, options.top_p, options.min_p)


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
    sampling = sampling_of(options)
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
        **sampling._asdict(),
        seeds=options.seed,
        on_step=stream,
    )
    console.print("\n")
    console.print(str(output.stats), markup=False)


class Comparison(RejectionSampler):
    """Strict verification that records what each method decides on the same drafts.

    The drafts share the noise of the target's samples, as they should for `strict`. The other methods decide by other
    noise, so that they accept as often as they accept drafts of their own. What they emit is not used.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__("probabilistic")  # so that `generate` hands the draft logits over
        schedule = AcceptanceSchedule.from_mean_rate(MEAN_RATE, num_draft_tokens=num_draft_tokens)
        self.num_draft_tokens = num_draft_tokens
        self.strict = RejectionSampler("strict")
        self.others = {
            "probabilistic": RejectionSampler("probabilistic"),
            "block": RejectionSampler("block"),
            "synthetic": RejectionSampler("synthetic", schedule=schedule),
        }
        self.decisions: dict[str, list[torch.Tensor]] = {name: [] for name in ("strict", *self.others)}

    def draft(self, *arguments: Any, **options: Any) -> DraftOutput:
        """Draw drafts for `strict`."""
        return self.strict.draft(*arguments, **options)

    def __call__(
        self,
        target_logits: torch.Tensor,
        draft_token_ids: torch.Tensor,
        draft_logits: torch.Tensor | None = None,
        **options: Any,
    ) -> SamplerOutput:
        """Verify one step by `strict`; record how many drafts each method accepts of the requests with K drafts."""
        output = self.strict(target_logits, draft_token_ids, draft_logits, **options)
        if draft_token_ids.shape[1] == self.num_draft_tokens:
            rows = (draft_token_ids >= 0).all(dim=1).nonzero()[:, 0]
            self.decisions["strict"].append(output.num_accepted[rows, None].cpu())
            rows = rows.repeat_interleave(SEEDS)
            again: dict[str, Any] = {
                name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in options.items()
            }
            again["seeds"] = again["seeds"] + (torch.arange(len(rows), device=rows.device) % SEEDS << 32)
            logits = None if draft_logits is None else draft_logits[rows]
            for name, sampler in self.others.items():
                decided = sampler(target_logits[rows], draft_token_ids[rows], logits, **again)
                self.decisions[name].append(decided.num_accepted.view(-1, SEEDS).cpu())
        return output

    def accepted(self) -> dict[str, torch.Tensor]:
        """Return [steps, seeds] accepted drafts for each method; the steps are the same, in the same order."""
        return {name: torch.cat(parts) for name, parts in self.decisions.items()}


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


def run_demo(options: Namespace, console: Console) -> None:
    """Compare the methods, and explain the comparison."""
    compare_methods(options, console)
    console.print(EXPLANATION, style="dim")


def compare_methods(options: Namespace, console: Console) -> None:
    """Generate texts with and without drafts, show a part of one, and tabulate how many drafts each method accepts.

    Raises:
        ValueError: the texts are so short that no step has K drafts, or as `Models.load` and `generate` say.
    """
    num_drafts, num_new = options.num_draft_tokens, options.max_new_tokens
    if num_new <= num_drafts:
        raise ValueError(
            f"--max-new-tokens: expected at least {num_drafts + 1}, for a step of all drafts, got {num_new}"
        )
    sampling = sampling_of(options)
    models = Models.load(options.target, options.draft, options.device)
    from specdecode.integrations.transformers import PromptLookup

    prompts = [models.encode(prompt)[0] for prompt in options.prompt or DEMO_PROMPTS]
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        run = partial(generate_texts, options, models, prompts, progress)
        comparison, strict = Comparison(num_drafts), RejectionSampler("strict")
        plain, _ = run("plain decoding", None, strict, TEXTS, sampling)
        compared, steps = run("all methods", models.draft, comparison, TEXTS, sampling)
        _, by_lookup = run("prompt lookup", PromptLookup(), strict, TEXTS, sampling)
        _, by_greedy = run("greedy", models.draft, strict, 1, Sampling(temperature=0.0))

    numbers = zip(("temperature", "top-k", "top-p", "min-p"), sampling)
    given = ", ".join(f"{name} {value:g}" for name, value in numbers if value is not None)
    console.print(f"[bold]strict[/bold], {given}, {num_drafts} drafts per step; one text's beginning:")
    show_beginning(models, prompts[0], steps, console)

    others = {
        "prompt lookup": accepted_in(by_lookup, num_drafts, num_new),
        "greedy": accepted_in(by_greedy, num_drafts, num_new),
    }
    console.print(acceptance_table(comparison.accepted(), others, num_drafts))
    tokens, same = int(plain.num_generated.sum()), int((compared.sequences == plain.sequences).all(dim=1).sum())
    relation = "identical to" if same == len(plain.sequences) else "NOT identical to"
    console.print(
        f"strict was {relation} plain decoding, token for token ({same} of {len(plain.sequences)} texts),\n"
        f"with {len(steps)} calls of the target instead of {tokens}, each text counted by itself"
    )


def generate_texts(
    options: Namespace,
    models: Models,
    prompts: Sequence[torch.Tensor],
    progress: Progress,
    name: str,
    drafter: Any,
    sampler: RejectionSampler,
    texts: int,
    sampling: Sampling,
) -> tuple[GenerationOutput, list[Step]]:
    """Generate so many texts of each prompt, of equally many tokens, under a name; return them and their steps."""
    from specdecode.integrations.transformers import generate

    steps: list[Step] = []

    def on_step(step: Step) -> None:
        steps.append(step)
        progress.advance(task, len(step.token_ids))

    input_ids, mask = padded([prompt for prompt in prompts for _ in range(texts)])
    task = progress.add_task(name, total=len(input_ids) * options.max_new_tokens)
    output = generate(
        models.target,
        drafter,
        input_ids,
        mask,
        method=sampler,
        num_draft_tokens=options.num_draft_tokens,
        max_new_tokens=options.max_new_tokens,
        **sampling._asdict(),
        seeds=options.seed,
        eos_token_id=[],  # so that all texts have equally many tokens
        on_step=on_step,
    )
    return output, steps


def show_beginning(models: Models, prompt: torch.Tensor, steps: Sequence[Step], console: Console) -> None:
    """Print how the first text begins: its prompt, then what became of each draft."""
    console.print(legend(console), end="\n\n")
    text, shown = Text().append(models.tokenizer.decode(prompt), style="dim"), 0
    for step in steps:
        if step.request == 0 and shown < SHOWN_TOKENS:
            text.append_text(show(models, step, console))
            shown += len(step.token_ids)
    console.print(text, end="\n\n", soft_wrap=True)


def padded(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts as one tensor, padded on the left, and the mask of what is not padding.

    >>> padded([torch.tensor([5, 6]), torch.tensor([7])])
    (tensor([[5, 6],
            [0, 7]]), tensor([[1, 1],
            [0, 1]]))
    """
    width = max(len(prompt) for prompt in prompts)
    input_ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return input_ids, mask


def accepted_in(steps: Sequence[Step], num_draft_tokens: int, max_new_tokens: int) -> torch.Tensor:
    """Return [steps, 1] accepted drafts of steps that were allowed K drafts, even if fewer were found."""
    lengths, accepted = Counter[int](), []
    for step in steps:
        if lengths[step.request] + num_draft_tokens < max_new_tokens:
            accepted.append(sum(kind.name == "ACCEPTED" for kind in step.kinds))
        lengths[step.request] += len(step.token_ids)
    return torch.tensor(accepted, dtype=torch.int64)[:, None]


def acceptance_table(methods: dict[str, torch.Tensor], others: dict[str, torch.Tensor], num_draft_tokens: int) -> Table:
    """Return the table of accepted drafts, each given as [steps, seeds]: of methods on the same drafts, then of others."""
    steps = len(methods["probabilistic"])
    table = Table(
        title=f"four methods on the same drafts: {steps} steps of {num_draft_tokens}",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    numbers = " ".join(str(i + 1) for i in range(num_draft_tokens))
    through = f"accepted through\ndraft {numbers}, %"
    for heading in ("method", "accepted\nper step", "vs\nprobabilistic", through, "calls\nsaved"):
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    for name, accepted in (methods | others).items():
        if name == next(iter(others)):
            table.add_section()
        mean = accepted.double().mean().item()
        difference = ""
        if name in ("strict", "block"):
            by_step = accepted.double().mean(dim=1) - methods["probabilistic"].double().mean(dim=1)
            difference = "{:+.3f}±{:.3f}".format(*mean_and_error(by_step.tolist()))
        positions = ((accepted > i).double().mean().item() for i in range(num_draft_tokens))
        shares = " ".join(f"{100 * share:.0f}" for share in positions)
        table.add_row(name, f"{mean:.2f}", difference, shares, f"{100 - 100 / (1 + mean):.1f}%")
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
