"""The comparison that `specdecode demo` prints: the decisions of three methods on the same drafts, and the calls saved."""

from __future__ import annotations

import shlex
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from specdecode.batch import SamplerOutput, Sampling
from specdecode.commands import Continuation, Models, legend, marked, sampling_of, write
from specdecode.demo import TARGET
from specdecode.drafting import DraftOutput
from specdecode.sampler import RejectionSampler

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

TEXTS = 4
"""The number of texts that the demo generates for each prompt."""

SEEDS = 4
"""The number of seeds with which each method decides on a step's drafts. (`strict` has one: the seed of the drafts.)"""

SHOWN_TOKENS = 64
"""The length of the text that the demo shows."""

EXPLANATION = """\
drafts accepted: the mean; strict, probabilistic and block judge the same drafts
prompt lookup: strict, with drafts copied from the text so far, where it has any
tree: strict, 4 candidates for the next token, 2 after each; larger calls
calls of the target: each gives 1 token without drafts, 1 + accepted with them
"""

NOT_TIMED = """\
No times: on a CPU, calls of models this small are mostly overhead, and fewer
of them save little. With a large target the table has tokens a second, too.
"""

NOT_FASTER = """\
No times: nothing was faster than plain decoding. Fewer calls save time where
a call of the target takes much longer than drafts and their verification.
"""

TIMED = """\
tokens a second: of all texts together; probabilistic and block decode none
"""


class Comparison(RejectionSampler):
    """Strict verification that records the decisions of each method on the same drafts.

    The drafts share the noise of the target's samples, as they should for `strict`. The other methods decide by
    independent noise, so that they accept as often as they accept their own drafts. Their tokens are not used.
    """

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__("probabilistic")  # so that `generate` passes draft logits
        self.num_draft_tokens = num_draft_tokens
        self.strict = RejectionSampler("strict")
        self.others = {"probabilistic": RejectionSampler("probabilistic"), "block": RejectionSampler("block")}
        self.decisions: dict[str, list[torch.Tensor]] = {name: [] for name in ("strict", *self.others)}
        self.other_seconds = 0.0

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
            started = time.perf_counter()  # copying to the CPU has waited for the device
            rows = rows.repeat_interleave(SEEDS)
            again: dict[str, Any] = {
                name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in options.items()
            }
            again["seeds"] = again["seeds"] + (torch.arange(len(rows), device=rows.device) % SEEDS << 32)
            logits = None if draft_logits is None else draft_logits[rows]
            for name, sampler in self.others.items():
                decided = sampler(target_logits[rows], draft_token_ids[rows], logits, **again)
                self.decisions[name].append(decided.num_accepted.view(-1, SEEDS).cpu())
            self.other_seconds += time.perf_counter() - started
        return output

    def accepted(self) -> dict[str, torch.Tensor]:
        """Return the numbers of accepted drafts, [steps, seeds], of each method, over the same steps."""
        return {name: torch.cat(parts) for name, parts in self.decisions.items()}


@dataclass
class Run:
    """The settings that all texts of a demo share."""

    options: Namespace
    models: Models
    sampling: Sampling
    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    def generate(
        self,
        name: str,
        drafter: Any,
        method: RejectionSampler,
        prompts: Sequence[torch.Tensor],
        num_tokens: int,
        tree: Sequence[int] | None = None,
    ) -> tuple[GenerationOutput, list[Step]]:
        """Generate `num_tokens` tokens after each prompt; return the output and its steps, and note the seconds."""
        from specdecode.integrations.transformers import generate

        steps: list[Step] = []

        def on_step(step: Step) -> None:
            steps.append(step)
            self.progress.advance(task, len(step.token_ids))

        input_ids, mask = padded(prompts)
        task = self.progress.add_task(name, total=len(input_ids) * num_tokens)
        started = time.perf_counter()
        output = generate(
            self.models.target,
            drafter,
            input_ids,
            mask,
            method=method,
            num_draft_tokens=self.options.num_draft_tokens,
            max_new_tokens=num_tokens,
            **self.sampling._asdict(),
            seeds=self.options.seed,
            eos_token_id=[],  # so that all texts have the same number of tokens
            on_step=on_step,
            tree=tree,
        )
        self.seconds[name] = time.perf_counter() - started
        self.progress.remove_task(task)
        return output, steps


def run_demo(options: Namespace, console: Console) -> None:
    """Compare the methods, explain the comparison, and suggest the next commands."""
    compare_methods(options, console)
    console.print(EXPLANATION, style="dim")
    models = () if options.target == TARGET else ("--target", str(options.target), "--draft", str(options.draft))
    prompt = (options.prompt or DEMO_PROMPTS[-1:])[0].strip()
    command = shlex.join(["specdecode", "generate", *models, "--method", "block", "--prompt", prompt])
    console.print(Text("Next: ", style="bold").append(command, style="not bold"), soft_wrap=True)


def compare_methods(options: Namespace, console: Console) -> None:
    """Generate texts with and without drafts, show a part, and tabulate accepted drafts and saved calls of each method.

    Raises:
        ValueError: the texts are so short that no step has K drafts; also the errors of `Models.load` and `generate`.
    """
    num_drafts, num_new = options.num_draft_tokens, options.max_new_tokens
    if num_new <= num_drafts:
        raise ValueError(f"max_new_tokens: expected at least {num_drafts + 1}, for a step of all drafts, got {num_new}")
    sampling = sampling_of(options)
    models = Models.load(options.target, options.draft, options.device)
    from specdecode.integrations.transformers import PromptLookup

    texts = options.prompt or DEMO_PROMPTS
    prompts = [models.encode(text)[0] for text in texts]
    batch = [prompt for prompt in prompts for _ in range(TEXTS)]
    strict, timed = RejectionSampler("strict"), calls_take_time(options)
    console.print(f"[bold]A small model drafts {num_drafts} tokens; the target checks them in one call.[/bold]")
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        run, comparison = Run(options, models, sampling, progress), Comparison(num_drafts)
        if timed:  # the first calls compile kernels
            for tree in (None, tree_of(num_drafts)):
                run.generate("warming up", models.draft, strict, batch, num_drafts + 1, tree)
        plain, _ = run.generate("plain decoding", None, strict, batch, num_new)
        compared, steps = run.generate("strict", models.draft, comparison, batch, num_new)
        _, by_lookup = run.generate("prompt lookup", PromptLookup(), strict, batch, num_new)
        _, by_tree = run.generate("tree", models.draft, strict, batch, num_new, tree_of(num_drafts))

    numbers = zip(("temperature", "top-k", "top-p", "min-p"), sampling)
    given = ", ".join(f"{name} {value:g}" for name, value in numbers if value is not None)
    console.print(f"So a text begins (strict, {given}):\n")
    show_beginning(Continuation(models.tokenizer, prompts[0].tolist()), texts[0], steps, console)

    others = {"prompt lookup": by_lookup, "tree": by_tree}
    accepted = comparison.accepted() | {name: accepted_in(steps, num_drafts, num_new) for name, steps in others.items()}
    run.seconds["strict"] -= comparison.other_seconds
    speeds = {name: len(batch) * num_new / seconds for name, seconds in run.seconds.items() if name != "warming up"}
    faster = timed and max(speeds.values()) > speeds["plain decoding"]
    means = {name: number.double().mean().item() for name, number in accepted.items()}
    table = savings_table(means, num_drafts, speeds if faster else {})
    table.title = f"{len(batch)} texts of {num_new} tokens"
    console.print(table)
    same = int((compared.sequences == plain.sequences).all(dim=1).sum())
    relation = "identical to" if same == len(batch) else "NOT identical to"
    console.print(
        f"strict was {relation} plain decoding, token for token ({same} of {len(batch)} texts),\n"
        f"with {len(steps)} calls of the target instead of {int(plain.num_generated.sum())}, each text counted by itself."
    )
    console.print(TIMED if faster else NOT_FASTER if timed else NOT_TIMED)


def calls_take_time(options: Namespace) -> bool:
    """Return whether calls are long enough to be timed: on a GPU, or with other models than the package's small ones."""
    return options.target != TARGET or torch.device(options.device).type != "cpu"


def show_beginning(continuation: Continuation, prompt: str, steps: Sequence[Step], console: Console) -> None:
    """Print the beginning of the first text: its prompt, then each token by its kind."""
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
    """Return prompts as one tensor, padded on the left, and the attention mask, 0 for padding.

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


def tree_of(depth: int) -> list[int]:
    """Return the widths of the demo's tree: 4, 2, then 1.

    >>> tree_of(2), tree_of(4)
    ([4, 2], [4, 2, 1, 1])
    """
    return [4, 2, *[1] * depth][:depth]


def accepted_in(steps: Sequence[Step], num_draft_tokens: int, max_new_tokens: int) -> torch.Tensor:
    """Return the numbers of accepted drafts, [steps, 1], of the steps that may have K drafts."""
    lengths, accepted = Counter[int](), []
    for step in steps:
        if lengths[step.request] + num_draft_tokens < max_new_tokens:
            accepted.append(sum(kind.name == "ACCEPTED" for kind in step.kinds))
        lengths[step.request] += len(step.token_ids)
    return torch.tensor(accepted, dtype=torch.int64)[:, None]


def savings_table(accepted: dict[str, float], num_draft_tokens: int, speeds: dict[str, float]) -> Table:
    """Return the table of savings: accepted drafts, calls of the target, and tokens a second if speeds are given.

    Args:
        accepted: the mean accepted drafts of a step, by the name of a method or drafter.
        num_draft_tokens: drafts per step.
        speeds: tokens a second, by the same names and "plain decoding", or empty.
    """
    table = Table(box=SIMPLE)
    headings = ["method", f"drafts accepted\nper step, of {num_draft_tokens}", "calls of the target\nfor 1,000 tokens"]
    headings += ["tokens\na second"] if speeds else []
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
    shown = {name: [f"{speed:,.0f}"] for name, speed in speeds.items()}
    table.add_row("plain decoding", "", "1,000", *shown.get("plain decoding", []))
    for name, mean in accepted.items():
        table.add_row(name, f"{mean:.2f}", f"{1000 / (1 + mean):,.0f}", *shown.get(name, []))
    return table
