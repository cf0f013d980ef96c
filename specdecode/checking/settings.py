"""The size of a run, its results so far, and its progress line."""

import sys
import time
import zlib
from typing import Any, NamedTuple

import numpy as np

from specdecode.checking.cases import CASES, GREEDY, Case, tree_cases
from specdecode.checking.findings import Finding
from specdecode.checking.models import How, Models, make_models
from specdecode.checking.runs import Outcome, Run
from specdecode.checking.subject import Arguments, Ids, OutputError, Subject

MAX_TABLE_LOGITS = 2**22
"""The most logits of one table of a model."""


class Settings(NamedTuple):
    """The size of a run."""

    num_draft_tokens: int
    vocab_size: int
    requests: int
    seed: int
    tree: tuple[int, ...] | None = None
    allow: float | None = None
    """The total variation of a token that a lossy rule may add; None: the verifier is meant to be exact."""

    @property
    def cases(self) -> tuple[Case, ...]:
        """The cases of a chain or of the tree, the main case first."""
        return tree_cases(self.tree) if self.tree else CASES

    @property
    def how(self) -> How:
        """The way to call the verifier where a question does not say otherwise."""
        return How(parents=self.tree or ())

    def shown(self) -> dict[str, Any]:
        """Return the settings as the report shows them."""
        sizes = {"vocabulary": self.vocab_size, "requests": self.requests, "seed": self.seed}
        chain: dict[str, Any] = {"drafts": self.num_draft_tokens}
        first = {"tree": list(self.tree)} if self.tree else chain
        return first | sizes | ({} if self.allow is None else {"allow": self.allow})

    def models(self, case: Case) -> Models:
        """Return the case's models, the same in every run of one size: the mistakes that it sees are known for these."""
        seed = int.from_bytes(case.name[:8].encode(), "little")
        drafts = self.num_draft_tokens if case.num_draft_tokens is None else case.num_draft_tokens
        states = max(1, min(case.max_states, MAX_TABLE_LOGITS // self.vocab_size))
        return make_models(drafts, self.vocab_size, states, case.shape, case.temperature, seed)

    def random(self, name: str, purpose: int = 0) -> np.random.Generator:
        """Return the question's random generator: it depends on the whole name, and on no other question."""
        return np.random.default_rng([self.seed, zlib.crc32(name.encode()), purpose])

    def size(self, share: float) -> int:
        """Return the number of requests in a share of all, at least 1."""
        return max(1, round(share * self.requests))


class Progress:
    """A line on standard error, if it is wanted."""

    def __init__(self, requests: int, wanted: bool) -> None:
        self.requests, self.wanted = requests, wanted
        self.done, self.what, self.shown = 0, "", -1.0

    def say(self, what: str) -> None:
        """Name what is being done."""
        self.what = what
        self.tick(0)

    def tick(self, requests: int) -> None:
        """Count requests; show it ten times a second at most."""
        self.done += requests
        now = time.monotonic()
        if self.wanted and (not requests or now - self.shown > 0.1):
            self.shown = now
            share = min(1.0, self.done / self.requests)
            self.show(f"\r{share:4.0%} {self.what:40}")

    def end(self) -> None:
        """Clear the line."""
        if self.wanted:
            self.show("\r" + " " * 46 + "\r")

    def show(self, text: str) -> None:
        """Write to standard error; if it is full, show no more."""
        try:
            print(text, end="", file=sys.stderr, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            self.wanted = False


class Session:
    """A subject, the size of its run, and the results so far."""

    def __init__(self, subject: Subject, settings: Settings, progress: Progress) -> None:
        self.subject, self.settings, self.progress = subject, settings, progress
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.not_asked: dict[str, list[str]] = {}
        """Names of questions, by the reason."""
        self.outcomes: dict[str, Outcome] = {}
        self.greedy: tuple[Arguments, Ids] | None = None
        """The arguments and the tokens of the greedy question."""
        self.lossiness: tuple[float, float, float] | None = None
        """Bounds of the total variation of a token in the main case, if the rule is meant to be lossy."""
        self.nan: dict[str, str] = {}
        """The first place at which NumPy computed NaN in the caller's functions, by the question."""

    def run(self, case: Case, name: str, how: How | None = None) -> Run:
        """Return a run with the models of a case and the random numbers of a question."""
        models, random = self.settings.models(case), self.settings.random(name)
        return Run(self.subject, models, how or self.settings.how, random, self.progress.tick)

    def note_nan(self, name: str) -> None:
        """Keep the first of the places at which a question computed NaN."""
        if self.subject.invalid:
            self.nan[name] = self.subject.invalid[0]
            self.subject.invalid.clear()

    def leave_out(self, name: str, reason: str) -> None:
        """Note that a question was not asked."""
        self.not_asked.setdefault(reason, []).append(name)

    def all_notes(self) -> list[str]:
        """Return the notes to report beside the checks: options not tested, general notes, notes of findings."""
        left_out = [f"not asked: {', '.join(names)}: {reason}" for reason, names in self.not_asked.items()]
        return left_out + self.notes + [note for each in self.findings for note in each.notes]

    def fail(self, name: str, error: OutputError, may_refuse: bool = False) -> None:
        """Add an error as a finding, or as a refusal. An exception that proves a mistake is no refusal."""
        if may_refuse and error.raised and not error.suspect:
            self.leave_out(name, f"{str(error).splitlines()[0]}.")
            return
        nan_at_zero = name == GREEDY and error.suspect == "nan_probabilities"
        suspect = "greedy_divides_by_0" if nan_at_zero else error.suspect
        self.findings.append(Finding(name, None, str(error), suspect=suspect, passed=False))
