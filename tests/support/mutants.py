"""Mutants: the reference with one piece of one function's source replaced by a mistake that people make.

A check that passes on the reference and fails on its mutants detects what it claims to detect. If the piece is no
longer in the source, because the reference was rewritten, that is an error: the mutant must be written again.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from unittest import mock

import pytest

from tests.support.enumeration import rooms_that_use


class Mutant(NamedTuple):
    """A mistake, and the check that must fail on it."""

    mistake: str
    function: Callable
    old: str
    new: str
    check: Callable[[], None]

    def __str__(self) -> str:
        """Name the test."""
        return f"{self.function.__module__.split('.')[-1]}.{self.function.__qualname__}: {self.mistake}"


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Run the reference with the mistake in it, in every module that uses the function, or in the class of the method."""
    source, name = textwrap.dedent(inspect.getsource(mutant.function)), mutant.function.__name__
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant}: the snippet is there {source.count(mutant.old)} times: {mutant.old}")
    scope: dict = {}
    module = sys.modules[mutant.function.__module__]
    exec(source.replace(mutant.old, mutant.new), vars(module), scope)
    *classes, _ = mutant.function.__qualname__.split(".")
    owners = [getattr(module, classes[0])] if classes else rooms_that_use(mutant.function)
    with ExitStack() as patches:
        for owner in owners:
            patches.enter_context(mock.patch.object(owner, name, scope[name]))
        yield


def assert_caught(mutant: Mutant) -> None:
    """Require that the check fails, and that it fails on an assertion."""
    with planted(mutant), pytest.raises(AssertionError):
        mutant.check()
