"""The comparison that `specdecode demo` prints: four methods decide on the same drafts."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from specdecode.batch import SamplerOutput
from specdecode.commands import Continuation, Models, legend, marked, sampling_of, write
from specdecode.drafting import DraftOutput
from specdecode.sampler import RejectionSampler
from specdecode.sampling import Sampling
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

    texts = options.prompt or DEMO_PROMPTS
    prompts = [models.encode(text)[0] for text in texts]
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
    show_beginning(Continuation(models.tokenizer, prompts[0].tolist()), texts[0], steps, console)

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


def show_beginning(continuation: Continuation, prompt: str, steps: Sequence[Step], console: Console) -> None:
    """Print how the first text begins: its prompt, then what became of each draft."""
    console.print(legend(console), end="\n\n")
    pieces, num_tokens = [], 0
    for step in steps:
        if step.request == 0 and num_tokens < SHOWN_TOKENS:
            pieces += continuation.add(step)
            num_tokens += len(step.token_ids)
    pieces += continuation.rest()
    write(Text().append(prompt, style="dim").append_text(marked(pieces, console)), console)
    console.print("\n")


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
