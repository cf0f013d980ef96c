"""The commands of the command line."""

from __future__ import annotations

import math
import os
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch

try:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.segment import Segments
    from rich.table import Table
    from rich.text import Text
except ImportError:
    raise SystemExit("specdecode: the command line needs rich: pip install 'specdecode[cli]'") from None

from specdecode.batch import SamplerOutput
from specdecode.checks import check_count, shown
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

INCOMPLETE = "\ufffd"
"""What the bytes of a character that is not complete decode to: U+FFFD, the replacement character."""

BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token that is one byte, in a vocabulary whose other tokens are characters."""

VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")
"""A folder with one of these has a tokenizer of its own."""

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
            ValueError: transformers is not installed, there is no draft model, a folder has no model that can be loaded, the
                draft has another tokenizer, or there is no such device.
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

        models = cls(
            load("--target", target),
            None if draft is None else load("--draft", draft),
            load_from(target, "--target", transformers.AutoTokenizer),
        )
        if draft is not None and any(file for pattern in VOCABULARY_FILES for file in draft.glob(pattern)):
            models.check_draft_tokenizer(load_from(draft, "--draft", transformers.AutoTokenizer))
        return models

    def check_draft_tokenizer(self, tokenizer: Any) -> None:
        """Raise if an id that both models can emit is one token in the target's tokenizer and another in this one.

        An id that only one of them knows is padding in the other, or was added to one of them.
        """
        from specdecode.integrations.transformers.supported import logits_width

        expected, got = self.tokenizer.get_vocab(), tokenizer.get_vocab()
        num_ids = min(logits_width(self.target), logits_width(self.draft))
        own = {i: token for token, i in expected.items() if i < num_ids}
        others = {i: token for token, i in got.items() if i in own and expected.get(token) != i}
        if others:
            i = min(others)
            raise ValueError(
                f"--draft: expected a model with the target's tokenizer, got one in which {len(others)} of {len(own)} ids "
                f"are other tokens, such as {i}: {shown(others[i])} instead of {shown(own[i])}"
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


class Continuation:
    """The text of the tokens that follow a prompt: each character belongs to the token that completes it.

    What a token decodes to depends on the others: the first token of a text can lose its space, and a character can take
    several tokens. So all tokens are decoded together, those of the prompt too. What later tokens could still change is held
    back: a character that is not complete, and where tokens are single bytes, such as <0xE2>, all bytes since the last other
    token, because a tokenizer decodes them either to characters or each to U+FFFD.

    Args:
        tokenizer: that of the target.
        prompt: its token ids.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_returned = len(self.decode(self.token_ids))  # characters, those of the prompt included
        self.kind = "plain"  # of the last token
        self.ends: list[tuple[str, int]] = []  # of each token: its kind, and where the text that it completes ends

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens with all its spaces: to remove some of them would change earlier text."""
        text: str = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text

    def add(self, step: Step) -> list[tuple[str, str]]:
        """Take the tokens of the next step; return what is now certain of the text, each token's kind and characters."""
        for kind, token_id in zip(step.kinds, step.token_ids):
            self.token_ids.append(token_id)
            self.kind = kind.name.lower()
            self.ends.append((self.kind, len(self.decode(self.token_ids).rstrip(INCOMPLETE))))
        num_certain = len(self.token_ids)
        while num_certain > self.num_prompt_tokens and self.is_byte(self.token_ids[num_certain - 1]):
            num_certain -= 1
        return self.take(self.decode(self.token_ids[:num_certain]))

    def rest(self) -> list[tuple[str, str]]:
        """Return what was held back, as no token follows."""
        text = self.decode(self.token_ids)
        self.ends.append((self.kind, len(text)))
        return self.take(text)

    def is_byte(self, token_id: int) -> bool:
        """Return whether a token is a single byte."""
        return BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token_id))) is not None

    def take(self, text: str) -> list[tuple[str, str]]:
        """Return what of the text was not returned before."""
        pieces = []
        for kind, end in self.ends:
            piece = text[self.num_returned : end]
            if piece:
                pieces.append((kind, piece))
                self.num_returned += len(piece)
        self.ends = [(kind, end) for kind, end in self.ends if end > len(text)]
        return pieces


def marked(pieces: Sequence[tuple[str, str]], console: Console) -> Text:
    """Return pieces of text, each in the colour of its kind or between its marks."""
    text = Text()
    for kind, piece in pieces:
        if console.color_system is None:
            text.append(MARKS[kind].format(piece))
        else:
            text.append(piece, style=STYLES[kind])
    return text


def write(text: Text, console: Console) -> None:
    """Print text as it is, tabs and long lines included, without an end of line after it."""
    console.print(Segments(text.render(console)), soft_wrap=True)


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

    prompt = models.encode(options.prompt)
    continuation = Continuation(models.tokenizer, prompt[0].tolist())
    started = False

    def stream(step: Step) -> None:
        nonlocal started
        if not started:  # only now is it known that the arguments are valid
            console.print(legend(console), end="\n\n")
            write(Text().append(options.prompt, style="dim"), console)
            started = True
        write(marked(continuation.add(step), console), console)

    output = generate(
        models.target,
        PromptLookup() if options.prompt_lookup else models.draft,
        prompt,
        method=options.method,
        num_draft_tokens=options.num_draft_tokens,
        max_new_tokens=options.max_new_tokens,
        **sampling._asdict(),
        seeds=options.seed,
        on_step=stream,
    )
    write(marked(continuation.rest(), console), console)
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
