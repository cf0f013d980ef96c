"""The commands of the command line, except the comparison of `specdecode demo`."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch

try:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.segment import Segments
    from rich.table import Table
    from rich.text import Text
except ImportError:
    raise SystemExit("specdecode: the command line needs rich: pip install rich") from None

from specdecode.arguments import Sizes, check_number, shown
from specdecode.batch import Sampling
from specdecode.demo import DRAFT, TARGET
from specdecode.synthetic import AcceptanceSchedule

if TYPE_CHECKING:
    from specdecode.integrations.transformers import Step

STYLES = {"accepted": "green", "recovered": "bold red", "bonus": "bold cyan", "plain": "yellow"}
MARKS = {"accepted": "{}", "recovered": "[-{}-]", "bonus": "{{+{}+}}", "plain": "[={}=]"}
"""The colour of each kind of token, and its marks on a console without colours."""

LABELS = {
    "accepted": "accepted draft",
    "recovered": "recovered after a rejection",
    "bonus": "bonus",
    "plain": "nothing drafted",
}

INCOMPLETE = "\ufffd"
"""U+FFFD, the replacement character: the bytes of an incomplete character decode to it."""

BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""The name of a single-byte token in vocabularies of characters."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""The name of a model on the Hub: OWNER/NAME, or a single name."""

FULL_BLOCK, BAR_WIDTH = "\u2588", 36

VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab.*", "tekken.json")
"""A folder with one of these files has its own tokenizer."""


class StandardOutput(Console):
    """A console for standard output that leaves the handling of a closed pipe to `cli.run`, like all other output."""

    def on_broken_pipe(self) -> None:
        """Raise the error again; rich itself would end the process."""
        raise BrokenPipeError


def make_console() -> Console:
    """Return a console for standard output; with NO_COLOR set it writes no escape sequences at all."""
    if os.environ.get("NO_COLOR"):
        return StandardOutput(highlight=False, color_system=None, force_terminal=False)
    return StandardOutput(highlight=False)


def sampling_of(options: Namespace) -> Sampling:
    """Return the sampling parameters, checked before the models are loaded.

    Raises:
        ValueError: a value is out of range.
    """
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    for name, number in sampling._asdict().items():
        check_number(name, number, Sizes({}, torch.device("cpu")))
    return sampling


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
            ValueError: transformers is not installed, there is no draft model, a folder has no loadable model, the draft
                has another tokenizer, or the device does not exist.
        """
        try:
            transformers: Any = import_module("transformers")
        except ImportError:
            raise ValueError("this command needs transformers: pip install transformers") from None
        if draft is None and target == TARGET:
            draft = DRAFT
        if draft is None and needs_draft:
            raise ValueError("draft: expected a folder, because --target is given, got none")
        try:
            is_usable = not torch.empty(0, device=device).is_meta  # which holds no data
        except (RuntimeError, AssertionError):  # PyTorch without CUDA fails an assertion
            is_usable = False
        if not is_usable:
            raise ValueError(f"device: expected a device that PyTorch can use here, got {device!r}") from None
        transformers.utils.logging.disable_progress_bar()
        if target == TARGET:
            torch.set_num_threads(1)  # more threads make a model this small slower

        def load(option: str, folder: Path) -> Any:
            model = load_from(folder, option, transformers.AutoModelForCausalLM, dtype=torch.float32)
            return model.eval().to(device)

        models = cls(
            load("target", target),
            None if draft is None else load("draft", draft),
            load_from(target, "target", transformers.AutoTokenizer),
        )
        if draft is not None and any(file for pattern in VOCABULARY_FILES for file in draft.glob(pattern)):
            models.check_draft_tokenizer(load_from(draft, "draft", transformers.AutoTokenizer))
        return models

    def check_draft_tokenizer(self, tokenizer: Any) -> None:
        """Raise if an id that both models can emit is a different token in this tokenizer than in the target's.

        An id that only one tokenizer has is padding in the other, or was added to one of them.
        """
        from specdecode.integrations.transformers.models import logits_width

        expected, got = self.tokenizer.get_vocab(), tokenizer.get_vocab()
        num_ids = min(logits_width(self.target), logits_width(self.draft))
        own = {i: token for token, i in expected.items() if i < num_ids}
        others = {i: token for token, i in got.items() if i in own and expected.get(token) != i}
        if others:
            i = min(others)
            raise ValueError(
                f"draft: expected a model with the target's tokenizer, got one in which {len(others)} of {len(own)} ids "
                f"are other tokens, such as {i}: {shown(others[i])} instead of {shown(own[i])}"
            )

    def encode(self, prompt: str) -> torch.Tensor:
        """Return [1, tokens] int64.

        Raises:
            ValueError: the prompt has no tokens.
        """
        token_ids: torch.Tensor = self.tokenizer(prompt, return_tensors="pt").input_ids.to(torch.int64)
        if token_ids.shape[1] == 0:
            raise ValueError(f"prompt: expected at least one token, got {prompt!r}")
        return token_ids


def load_from(folder: Path, option: str, loader: Any, **options: Any) -> Any:
    """Return the model or tokenizer that `loader.from_pretrained` reads from a folder.

    Raises:
        ValueError: loading failed, for any reason; the message names the option that gave the folder.
    """
    cause: Exception | None = None
    try:
        if (folder / "config.json").is_file():
            return loader.from_pretrained(folder, **options)
        reason = "it has no config.json" if folder.exists() else advice(folder)
    except Exception as error:  # a broken file can raise anything
        cause, reason = error, shorten(" ".join(f"{type(error).__name__}: {error}".split()), 200, placeholder="...")
    raise ValueError(
        f"{option}: expected a folder with a model in Hugging Face format, got {folder}: {reason}"
    ) from cause


def advice(folder: Path) -> str:
    """Return the error text for a folder that does not exist; a name like a Hub model's gets the download command."""
    name, absent = folder.as_posix(), "there is no such folder"
    if HUB_ID.fullmatch(name) is None:
        return absent
    return f"{absent}, and models are not downloaded; `hf download {name} --local-dir FOLDER` puts one into a folder"


class Continuation:
    """The text of the tokens that follow a prompt: each character belongs to the token that completes it.

    The text of a token depends on its neighbours: the first token of a text can lose its space, and a character can take
    several tokens. So all tokens are decoded together, including the prompt. Text that later tokens could still change is
    held back: an incomplete character, and, if tokens are single bytes such as <0xE2>, all bytes since the last other
    token, because a tokenizer decodes them either to characters or each to U+FFFD.

    Args:
        tokenizer: the target's tokenizer.
        prompt: the prompt's token ids.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.token_ids = list(prompt)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_returned = len(self.decode(self.token_ids))  # characters, those of the prompt included
        self.kind = "plain"  # of the last token
        self.ends: list[tuple[str, int]] = []  # of each token: its kind, and the end of the text that it completes

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without cleaning up spaces, which would change earlier text."""
        text: str = self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
        return text

    def add(self, step: Step) -> list[tuple[str, str]]:
        """Add the tokens of the next step; return the text that is now final, as (kind, characters) of each token."""
        for kind, token_id in zip(step.kinds, step.token_ids):
            self.token_ids.append(token_id)
            self.kind = kind.name.lower()
            self.ends.append((self.kind, len(self.decode(self.token_ids).rstrip(INCOMPLETE))))
        num_certain = len(self.token_ids)
        while num_certain > self.num_prompt_tokens and self.is_byte(self.token_ids[num_certain - 1]):
            num_certain -= 1
        return self.take(self.decode(self.token_ids[:num_certain]))

    def rest(self) -> list[tuple[str, str]]:
        """Return the text that was held back, at the end."""
        text = self.decode(self.token_ids)
        self.ends.append((self.kind, len(text)))
        return self.take(text)

    def is_byte(self, token_id: int) -> bool:
        """Return whether a token is a single byte."""
        return BYTE.fullmatch(str(self.tokenizer.convert_ids_to_tokens(token_id))) is not None

    def take(self, text: str) -> list[tuple[str, str]]:
        """Return the new pieces of the text as (kind, piece)."""
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
    """Print text unchanged, including tabs and long lines, without a newline at the end."""
    console.print(Segments(text.render(console)), soft_wrap=True)


def legend(console: Console) -> Text:
    """Return one line that explains the colours or marks."""
    plain = console.color_system is None
    labels = [Text(MARKS[kind].format(label) if plain else label, style=STYLES[kind]) for kind, label in LABELS.items()]
    return Text("  ").join(labels)


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
        if not started:  # the first step shows that the arguments are valid
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
        bar = bar_character(console.encoding) * round(BAR_WIDTH * joint)
        table.add_row(str(position), f"{conditional:.6f}", f"{joint:.6f}", bar)
    console.print(table)


def bar_character(encoding: str) -> str:
    """Return the character of bars: a full block, or # in an encoding without it.

    >>> bar_character("ascii")
    '#'
    """
    try:
        FULL_BLOCK.encode(encoding)
    except UnicodeEncodeError:
        return "#"
    return FULL_BLOCK
