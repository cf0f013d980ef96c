"""The subject of a check: a verifier, and perhaps a drafter. Calls pass the arguments that they take, and check outputs."""

import dataclasses
import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdecode.checking.trees import depths, on_a_path

Ids = NDArray[np.int64]

VERIFIER_OPTIONS = ("draft_logits", "temperature", "seeds", "positions")
DRAFTER_OPTIONS = ("temperature", "seeds", "positions", "offset")
AFTER_REJECTION = "every token but the last to be the draft in its place: after a rejection comes one token, then -1"
ON_A_PATH = "every token but the last to be a child of the one before"
NO_TOKEN = "at least one token"
MAX_PRINTED = 200
"""The most numbers of an array that a report prints."""

MISTAKE_BY_RULE = {
    AFTER_REJECTION: "goes_on_after_a_rejection",
    ON_A_PATH: "tree_leaves_the_path",
    NO_TOKEN: "no_token_after_the_drafts",
}
"""Known mistakes by the rule that an output breaks."""

MISTAKE_BY_MESSAGE = {r"\bnans?\b": "nan_probabilities", r"negative|\b0 > p|pvals < 0": "negative_probabilities"}
"""Known mistakes by the message of an exception, such as those that the samplers of NumPy and PyTorch raise."""

LIBRARY = re.compile(
    rf"^<|site-packages|{re.escape(sysconfig.get_path('stdlib'))}|{re.escape(str(Path(__file__).parent))}"
)
"""Files whose functions do not belong to the subject."""


class OutputError(Exception):
    """The verifier or the drafter raised, or returned an invalid output."""

    def __init__(self, message: str, raised: bool = False, suspect: str = "") -> None:
        super().__init__(message)
        self.raised = raised
        """Whether the function raised, rather than returned an invalid output."""

        self.suspect = suspect
        """The id of a known mistake that the error proves, or ""."""


class Arguments(NamedTuple):
    """The arguments of a verifier."""

    target_logits: NDArray[np.float32]
    draft_token_ids: Ids
    draft_logits: NDArray[np.float32] | None
    temperature: float
    seeds: Ids
    positions: Ids
    parents: Ids | None = None
    """[N] parents of the nodes of a tree, or None. Then `draft_token_ids` are [n, N], and each node has a row of logits."""

    def requests(self, some: slice) -> "Arguments":
        """Return a copy of the arguments for some requests."""
        values: list[Any] = [each[some].copy() if isinstance(each, np.ndarray) else each for each in self[:6]]
        values.append(None if self.parents is None else self.parents.copy())
        return Arguments(*values)

    @property
    def most_drafts(self) -> int:
        """The most drafts that a request can accept."""
        if self.parents is None:
            return int(self.draft_token_ids.shape[1])
        return max(depths(self.parents.tolist()))


@dataclass(frozen=True)
class Subject:
    """A verifier and its drafter, and the arguments that they take."""

    verify: Callable[..., Any]
    draft: Callable[..., Any] | None
    takes: frozenset[str]
    """The options of VERIFIER_OPTIONS that the verifier takes."""

    logits_by_position: bool = False
    """Whether the verifier takes draft logits as its third positional argument, under another name."""

    draft_takes: frozenset[str] = frozenset()
    """The options of DRAFTER_OPTIONS that the drafter takes."""

    tree: bool = False
    """Whether the verifier takes trees."""

    invalid: list[str] = field(default_factory=list)
    """Places in the subject's code where NumPy computed NaN since the list was cleared."""

    @classmethod
    def of(cls, verify: Callable[..., Any], draft: Callable[..., Any] | None = None, tree: bool = False) -> "Subject":
        """Build a subject from two functions, by their signatures.

        Raises:
            ValueError: a signature does not allow the calls of the contract.
        """
        parameters = parameters_of("verify", verify)
        by_position = 3 if tree else 2
        positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        takes = options_of(parameters, VERIFIER_OPTIONS)
        logits_by_position = (
            not tree
            and "draft_logits" not in takes
            and len(positional) > by_position
            and positional[by_position].name not in VERIFIER_OPTIONS
        )
        if logits_by_position:
            takes, by_position = takes | {"draft_logits"}, by_position + 1
        enough = len(positional) >= 2 + tree or any(each.kind == each.VAR_POSITIONAL for each in parameters)
        if not enough or required(parameters, positional[:by_position]) - {*VERIFIER_OPTIONS}:
            first = "target_logits, token_ids, parents" if tree else "target_logits, draft_token_ids"
            raise ValueError(
                f"verify: expected a function of ({first}) and of any of draft_logits, temperature, seeds and positions, "
                f"the first {'three' if tree else 'two'} by position, got one of {inspect.signature(verify)}"
            )
        draft_takes = draft_options(draft) if draft is not None else frozenset()
        return cls(verify, draft, takes, logits_by_position, draft_takes, tree)

    def arguments_of_call(self, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the keyword arguments of a call."""
        positional: list[Any] = [arguments.target_logits, arguments.draft_token_ids]
        options = {name: getattr(arguments, name) for name in VERIFIER_OPTIONS if name in self.takes}
        if self.tree:
            positional.append(arguments.parents)
        if self.logits_by_position:
            positional.append(options.pop("draft_logits"))
        return positional, options

    def call(self, arguments: Arguments) -> Ids:
        """Verify; return the checked ids, [n, K + 1] int64.

        Raises:
            OutputError: the verifier raised, or returned an invalid output.
        """
        positional, options = self.arguments_of_call(arguments.requests(slice(None)))
        try:
            with self.noting_nan():
                output = self.verify(*positional, **options)
        except Exception as error:  # a black box can raise anything
            raise self.smallest_error(arguments, error, lambda: self.verify(*positional, **options)) from error
        if output is None:
            blamed = missing_return(lambda: self.verify(*positional, **options))
            reason = f"expected [{len(arguments.seeds)}, {arguments.most_drafts + 1}] integer ids, got None"
            lines = [f"verify: {reason}", *([f"  {blamed}"] if blamed else []), self.call_text(arguments, 0)]
            raise OutputError("\n".join(lines), suspect="no_return")
        return checked_ids(output, arguments, self)

    def noting_nan(self) -> np.errstate:
        """Return a context that silences NumPy's warnings and adds the places where NaN arises to `invalid`."""

        def note(kind: str, flag: int) -> None:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and f"{os.sep}numpy{os.sep}" in frame.f_code.co_filename:
                frame = frame.f_back
            place = "" if frame is None else place_of(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            if place and place not in self.invalid:
                self.invalid.append(place)

        return np.errstate(all="ignore", invalid="call", call=note)

    def smallest_error(self, arguments: Arguments, error: Exception, call: Callable[[], Any]) -> OutputError:
        """Return the OutputError for an exception, with few requests: they are halved while one half raises too."""
        count = len(arguments.seeds)
        reason = described(error)
        if count > 1:
            for half in (slice(0, count // 2), slice(count // 2, count)):
                try:
                    self.call(arguments.requests(half))
                except OutputError as fewer:
                    if fewer.raised:
                        return fewer
            reason += f" (for {count} requests, of which this is the first; neither half of them raises)"
        suspects = [
            name for pattern, name in MISTAKE_BY_MESSAGE.items() if re.search(pattern, str(error), re.IGNORECASE)
        ]
        if suspects and self.invalid:
            suspects = ["nan_probabilities"]  # a subject's test that weights are not negative fails for NaN too
        if "NoneType" in str(error) and arguments.draft_logits is not None and (blamed := missing_return(call)):
            reason, suspects = f"{reason}\n  {blamed}", ["no_return"]
        message = f"verify raised {reason}\n{self.call_text(arguments, 0)}"
        return OutputError(message, raised=True, suspect=suspects[0] if suspects else "")

    def call_text(self, arguments: Arguments, index: int) -> str:
        """Return the call with one request, as Python code."""
        positional, options = self.arguments_of_call(arguments.requests(slice(index, index + 1)))
        parts = [*map(array_text, positional), *(f"{name}={array_text(value)}" for name, value in options.items())]
        indent = "\n           "
        return f"  called: verify({(',' + indent).join(parts)})"

    def call_draft(self, logits: NDArray[np.float32], offset: int, options: dict[str, Any]) -> Ids:
        """Draft one token for each request, [n] int64; -1 is no draft.

        Raises:
            OutputError: the drafter raised, or returned an invalid output.
        """
        assert self.draft is not None
        keywords = {name: value for name, value in ({**options, "offset": offset}).items() if name in self.draft_takes}
        try:
            with self.noting_nan():
                output = self.draft(logits.copy(), **keywords)
        except Exception as error:
            call = f"draft([{len(logits)}, {logits.shape[1]}] logits, offset={offset}, ...)"
            raise OutputError(f"draft raised {described(error)}\n  called: {call}", raised=True) from error
        ids = integers(output, (len(logits),))
        if isinstance(ids, str):
            raise OutputError(f"draft: expected [{len(logits)}] integer ids, got {ids}")
        bad = (ids < -1) | (ids >= logits.shape[1])
        if bad.any():
            index = int(bad.argmax())
            most, row = logits.shape[1] - 1, array_text(logits[index])
            raise OutputError(f"draft: expected ids from -1 to {most}, got {ids[index]} for logits {row}")
        return ids


def missing_return(call: Callable[[], Any]) -> str:
    """Repeat a call; return a sentence that names the function that returned None, or "" if no function did.

    It is the last such function, preferably without any `return` of a value: others may pass on a None that they were given.
    """
    found: list[CodeType] = []

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "return" and argument is None and not LIBRARY.search(frame.f_code.co_filename):
            found.append(frame.f_code)

    raising: set[CodeType] = set()
    sys.setprofile(profile)
    try:
        call()
    except Exception as error:  # the same exception as in the first call
        raising = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    finally:
        sys.setprofile(None)
    candidates = [each for each in found if each not in raising]  # the profiler reports None for functions that raise
    # Functions without such a `return` go to the end.
    candidates.sort(key=lambda each: re.search(r"\breturn +(?!None\b)\S", source_of(each)) is None)
    if not candidates:
        return ""
    code = candidates[-1]
    return f"{code.co_name} ({Path(code.co_filename).name}, line {code.co_firstlineno}) returned None: is a return missing?"


def source_of(code: CodeType) -> str:
    """Return the source of a function, "" if it has no file."""
    try:
        return inspect.getsource(code)
    except OSError:
        return ""


def described(error: Exception) -> str:
    """Return an exception's type and message, and the last place in the subject's file on the way to it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the call in this file
    own = [each for each in frames if each.filename == frames[0].filename]
    where = f" ({place_of(own[-1].filename, own[-1].lineno, own[-1].name)})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def place_of(file: str, line: int | None, function: str) -> str:
    """Return the text of a place in a program: file, line and function."""
    return f"{Path(file).name}, line {line}, in {function}"


def parameters_of(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function; raise if the value is not a function or has no signature."""
    if not callable(function):
        raise ValueError(f"{name}: expected a function, got {type(function).__name__}")
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        raise ValueError(f"{name}: expected a function whose signature Python can tell, got {function!r}") from None


def options_of(parameters: list[inspect.Parameter], known: tuple[str, ...]) -> frozenset[str]:
    """Return the known options that a function takes; a function with **keywords takes all of them."""
    takes_any_keyword = any(each.kind == each.VAR_KEYWORD for each in parameters)
    return frozenset(known) if takes_any_keyword else frozenset(each.name for each in parameters) & frozenset(known)


def required(parameters: list[inspect.Parameter], given: list[inspect.Parameter]) -> set[str]:
    """Return the names of the parameters without a default that are not given by position."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {each.name for each in parameters if each.default is each.empty and each.kind not in variadic} - {
        each.name for each in given
    }


def draft_options(draft: Callable[..., Any]) -> frozenset[str]:
    """Return the options of DRAFTER_OPTIONS that a drafter takes."""
    parameters = parameters_of("draft", draft)
    if not parameters or required(parameters, parameters[:1]) - {*DRAFTER_OPTIONS}:
        raise ValueError(
            "draft: expected a function of (draft_logits) and of any of temperature, seeds, positions and offset, "
            f"got one of {inspect.signature(draft)}"
        )
    return options_of(parameters[1:], DRAFTER_OPTIONS)


def as_array(output: Any) -> NDArray[Any]:
    """Return an array, nested lists, or a tensor on any device as a NumPy array."""
    if hasattr(output, "detach"):  # a PyTorch tensor; this file does not import PyTorch
        output = output.detach().cpu()
    return np.asarray(output)


def integers(output: Any, shape: tuple[int, ...]) -> Ids | str:
    """Return the output as int64 ids of this shape, or a description of an output of another kind."""
    try:
        ids = as_array(output)
    except Exception as error:  # lists of different lengths, or an object that does not convert
        return fields_text(output) or f"{type(output).__name__}: {error}"
    if ids.shape == shape and ids.dtype.kind in "iu":
        return ids.astype(np.int64)
    return fields_text(output) or (f"{ids.dtype} {list(ids.shape)}" if ids.ndim else repr(output))


def fields_text(output: Any) -> str:
    """Return the text of the field types of a tuple, a dictionary or a dataclass; "" for other types."""
    if isinstance(output, dict):
        names, values = [f"{name}: " for name in output], [*output.values()]
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        held = [each.name for each in dataclasses.fields(output)]
        names, values = [f"{name}: " for name in held], [getattr(output, name) for name in held]
    elif isinstance(output, tuple):
        names = [f"{name}: " for name in getattr(output, "_fields", ())] or [""] * len(output)
        values = list(output)
    else:
        return ""
    kinds = [f"{each.dtype} {list(each.shape)}" if hasattr(each, "dtype") else type(each).__name__ for each in values]
    return f"{type(output).__name__}({', '.join(map(str.__add__, names, kinds))}): return the ids alone"


def checked_ids(output: Any, arguments: Arguments, subject: Subject) -> Ids:
    """Return the output as ids, [n, K + 1] int64: accepted drafts, one more token, then -1.

    Raises:
        OutputError: the output has another form.
    """
    drafts = arguments.draft_token_ids
    requests, num_drafts = len(drafts), arguments.most_drafts
    vocab = arguments.target_logits.shape[2]
    expected = f"[{requests}, {num_drafts + 1}] integer ids"
    ids = integers(output, (requests, num_drafts + 1))
    if isinstance(ids, str):
        filled = ", each row filled up with -1" if isinstance(output, list) else ""
        raise OutputError(f"verify: expected {expected}{filled}, got {ids}\n{subject.call_text(arguments, 0)}")
    ended = ids == -1
    length = np.where(ended.any(axis=1), ended.argmax(axis=1), num_drafts + 1)
    slots = np.arange(num_drafts + 1)
    # K of a tree is its depth, the most drafts that any path has.
    given = given_drafts(drafts) if arguments.parents is None else np.full(requests, num_drafts)
    before_last = slots[:-1] < (length - 1)[:, None]
    problems = {
        f"ids from 0 to {vocab - 1}, or -1 after the last token": ((ids < -1) | (ids >= vocab)).any(axis=1),
        NO_TOKEN: length == 0,
        "only -1 after the first -1": ((slots > length[:, None]) & ~ended).any(axis=1),
        "no more tokens than drafts and one": length > given + 1,
    }
    if arguments.parents is None:
        problems[AFTER_REJECTION] = ((ids[:, :-1] != drafts) & before_last).any(axis=1)
    else:
        problems[ON_A_PATH] = ~on_a_path(ids, drafts, arguments.parents)
    for rule, bad in problems.items():
        if bad.any():
            index = int(bad.argmax())
            given_as = "drafts" if arguments.parents is None else "nodes"
            what = f"got {ids[index].tolist()} for {given_as} {drafts[index].tolist()}"
            what += f" ({int(bad.sum())} of {requests} requests)"
            call = f"{subject.call_text(arguments, index)}\n  returned: {array_text(ids[index : index + 1])}"
            suspect = MISTAKE_BY_RULE.get(rule, "")
            if given[index] < num_drafts:  # with fewer drafts, -1 as an index is the likeliest mistake
                what += "\n  -1 means that there is no draft: is it used as an index?"
                suspect = "minus_1_is_an_index"
            raise OutputError(f"verify: expected {rule},\n  {what}\n{call}", suspect=suspect)
    return ids


def given_drafts(drafts: Ids) -> Ids:
    """Return the number of drafts of each request before its first -1, [n]."""
    return np.asarray(np.cumprod(drafts != -1, axis=1).sum(axis=1))


def array_text(values: Any) -> str:
    """Return numbers as Python code, to four decimals; an array of more than MAX_PRINTED as its dtype and shape."""
    if values is None or isinstance(values, float | int):
        return repr(values)
    if values.size > MAX_PRINTED:
        return f"<{values.dtype} {list(values.shape)}: ask with a smaller vocabulary to see it>"
    if not values.size:
        return f"np.zeros({values.shape}, dtype=np.{values.dtype})"
    numbers = np.array2string(values, separator=", ", precision=4, max_line_width=10**9, suppress_small=True)
    numbers = re.sub(r"\s+", " ", numbers).replace("[ ", "[").replace("inf", "np.inf").replace("nan", "np.nan")
    return f"np.array({numbers}, dtype=np.{values.dtype})"
