"""Calls of the kernels in all variants, the reference's results, and single launches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from reference import oracle
from specdecode import AcceptanceSchedule, RejectionSampler, kernels
from specdecode.batch import VerificationBatch
from specdecode.kernels import bundles
from specdecode.kernels.arguments import Sizes
from specdecode.kernels.call import plan_of
from specdecode.kernels.launch import Launch, Plan
from specdecode.kernels.signature import Symbol
from specdecode.noise import BLOCK_SIZE
from tests.conftest import ON_GPU
from tests.support.batches import verification_batch
from tests.support.differential import Case, case

DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
needs_interpreter = pytest.mark.skipif(
    ON_GPU, reason="needs the interpreter, which looks up what a kernel calls at each call"
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCHEDULE = AcceptanceSchedule.from_mean_rate(0.6, num_draft_tokens=40)
NEVER = AcceptanceSchedule.from_rates([0.0])

KINDS = ["strict", "probabilistic", "given logsumexp", "deterministic", "synthetic", "synthetic strict"]
KINDS += ["block", "block given logsumexp", "block deterministic"]
"""Kinds of calls: a method, and its draft inputs besides ids."""

FEW_KINDS = KINDS if ON_GPU else ["strict", "given logsumexp", "block"]
FEW, MANY, LARGE = WAYS = {"large": False, "many": False}, {"large": False, "many": True}, {"large": True}
"""The strategies of calls, which otherwise depend on the number of requests and rows."""


def small(*cases: Any) -> tuple:
    """Return all cases on a GPU, the first ones in the interpreter."""
    return cases if ON_GPU else cases[:1]


def method_of(kind: str) -> str:
    """Return the method of a kind of call."""
    first = kind.split()[0]
    return first if first in ("strict", "synthetic", "block") else "probabilistic"


def given(kind: str, batch: Case) -> tuple[str, Tensor | None, Tensor | None]:
    """Return the method of a kind of call, its draft logits, and their logsumexp, if any."""
    draft_logits = None if kind.endswith(("strict", "deterministic")) else batch.draft_logits
    logsumexp = None
    if kind.endswith("given logsumexp"):
        columns = [drafted(batch, offset).logsumexp for offset in range(batch.draft_logits.shape[1])]
        logsumexp = torch.stack(columns, 1) if columns else torch.empty(*batch.draft_token_ids.shape, device=DEVICE)
    return method_of(kind), draft_logits, logsumexp


def drafted(batch: Case, offset: int) -> Any:
    """Return the output of the drafting step at an offset."""
    sampler, logits = RejectionSampler("probabilistic", backend="triton"), batch.draft_logits[:, offset]
    return sampler.draft(logits, batch.temperature, batch.seeds, batch.positions + offset)


def checked(kind: str, batch: Case) -> tuple[str, VerificationBatch, AcceptanceSchedule | None]:
    """Return the method, the checked arguments and the schedule of a kind of call."""
    method, draft_logits, logsumexp = given(kind, batch)
    numbers = batch.temperature, batch.seeds, batch.positions
    arguments = verification_batch(batch.target_logits, batch.draft_token_ids, draft_logits, logsumexp, *numbers)
    return method, arguments, SCHEDULE if method == "synthetic" else None


def verify(kind: str, batch: Case, **options: Any) -> Any:
    """Run the kernels on a case, with one of the strategies."""
    return kernels.verify(*checked(kind, batch), **options)


def expected(kind: str, batch: Case) -> list:
    """Return the reference's outcome of each request."""
    outcomes = []
    for index in range(len(batch.seeds)):
        target, token_ids, draft = batch.rows(index)
        if kind.endswith(("strict", "deterministic")):
            draft = None
        options = {**batch.request(index), "conditional_rates": SCHEDULE.conditional_rates}
        outcomes.append(oracle.verify(method_of(kind), target, token_ids, draft, **options))
    return outcomes


@contextmanager
def memory_of(value: float) -> Iterator[None]:
    """Fill the workspace of calls with a float32 number, except the part that starts as zeros.

    Ones are plausible statistics. Non-finite statistics would be computed again.
    """
    allocate = Plan.allocate

    def full(plan: Plan, length: int, zeros: int) -> Tensor:
        workspace = allocate(plan, length, 0).view(torch.float32).fill_(value).view(torch.int32)
        workspace[:zeros] = 0
        return workspace

    with mock.patch.object(Plan, "allocate", full):
        yield


def forget_plans() -> None:
    plan_of.cache_clear()


@contextmanager
def planned_with(module: Any, **constants: Any) -> Iterator[None]:
    """Plan steps with other constants of a module."""
    with mock.patch.multiple(module, **constants):
        forget_plans()
        try:
            yield
        finally:
            forget_plans()


def sizes_of(batch: int, num_draft_tokens: int, vocab_size: int) -> Sizes:
    """Return the bundle of sizes of a call."""
    of_class = bundles.size_constants(num_draft_tokens, vocab_size)
    return Sizes(batch, num_draft_tokens, vocab_size, -(-vocab_size // BLOCK_SIZE), *of_class)


# ---------------------------------------------------------------------------------------------------------------------
# Launches one by one, and kernels of tests
# ---------------------------------------------------------------------------------------------------------------------


class PlannedCall:
    """The launches of a call, run one by one; `parts` is the workspace between them, `output` is their output."""

    def __init__(self, kind: str, batch: Case, **options: Any) -> None:
        calls: list = []
        arguments = checked(kind, batch)
        with mock.patch.object(Plan, "run", lambda plan, *values: calls.append((plan, *values))):
            self.output = kernels.verify(*arguments, **options)
        ((self.plan, self.tensors, self.numbers),) = calls
        self.launches = list(self.plan.launches)
        self.values = self.plan.values(self.tensors, self.numbers)
        self.parts = parts_of(self.plan, self.values)
        for part in self.parts.values():
            part.fill_(torch.nan if part.dtype == torch.float32 else -1)
        if "state" in self.parts:
            self.parts["state"][: self.values["zeros"]] = 0

    def bundle(self, name: str, kernel: Any = None) -> Any:
        """Return a bundle by the name of its parameter, e.g. `sizes`, from the launch of a kernel or from any launch."""
        found = next(
            bundle
            for launch in self.launches
            for parameter, bundle in zip(launch.kernel.arg_names, launch.bundles)
            if parameter == name and kernel in (None, launch.kernel)
        )
        return with_numbers(found, self.values)

    def run(self, *launches: Launch) -> "PlannedCall":
        """Run launches of this call, or other launches with its arguments."""
        run(launches, {**self.tensors, **self.parts}, self.numbers, self.plan)
        return self

    def run_kernel(self, kernel: Any, programs: int, names: list[str], *bundles: NamedTuple) -> None:
        """Launch a kernel of a test with some of the bundles of this call, and with other bundles."""
        values: dict[str, Any] = {}
        more = [named(bundle, values) for bundle in bundles]
        launch = Launch(kernel, (str(programs), "1", "1"), (*map(self.bundle, names), *more), {"num_warps": 8})
        run([launch], {**self.tensors, **self.parts, **values}, self.numbers, self.plan)


def parts_of(plan: Plan, values: dict[str, Any]) -> dict[str, Tensor]:
    """Return the parts of the workspace of a call, each in separate memory, given the values of `Plan.values`."""
    return {
        name: torch.zeros(eval(length, {}, values), dtype=dtype, device=DEVICE)
        for name, (dtype, length) in plan.parts.items()
    }


def run(launches: Any, tensors: dict[str, Any], numbers: dict[str, float], of: Plan | None = None) -> None:
    """Run launches, whose expressions may use the definitions of their plan."""
    device = torch.device(DEVICE, 0) if ON_GPU else torch.device(DEVICE)
    plan = Plan(device, {} if of is None else of.definitions, {})
    plan.functions = {} if of is None else of.functions
    plan.launches = list(launches)
    plan.run(tensors, numbers)


def run_kernel(kernel: Any, programs: int, *bundles: NamedTuple, num_warps: int = 8) -> None:
    """Launch a kernel of a test, given bundles with tensors in place of symbols."""
    values: dict[str, Any] = {}
    given = tuple(named(bundle, values) for bundle in bundles)
    launch = Launch(kernel, (str(programs), "1", "1"), given, {"num_warps": num_warps})
    run([launch], values, {})


def with_numbers(value: Any, values: dict[str, Any]) -> Any:
    """Return a bundle of a plan with the numbers of a call."""
    if isinstance(value, tuple):
        return type(value)(*[with_numbers(field, values) for field in value])
    is_number = isinstance(value, Symbol) and value.dtype is None
    return eval(value.expression, {}, values) if is_number else value


def named(value: Any, values: dict[str, Any]) -> Any:
    """Replace the tensors of a bundle by symbols, and record the tensors."""
    if isinstance(value, Tensor):
        name = f"test_{len(values)}"
        values[name] = value
        return Symbol(name, value.dtype)
    if isinstance(value, tuple):
        return type(value)(*[named(field, values) for field in value])
    return value


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


def sliced(logits: Tensor) -> Tensor:
    """Return the same rows, starting at odd indices of wider rows."""
    wide = logits.new_full((*logits.shape[:-1], logits.shape[-1] + 5), 7)
    wide[..., 3:-2] = logits
    return wide[..., 3:-2]


def strided(logits: Tensor) -> Tensor:
    """Return the same rows as every second element of wider rows."""
    return logits.repeat_interleave(2, dim=-1)[..., ::2]


def impossible_drafts(requests: int, vocab: int, closeness: float) -> Case:
    """Return a batch of one impossible draft per request; draft rows differ from target rows by `closeness`.

    They differ by blocks, with and without a residual, and a little by tokens. With infinite closeness, the first block
    and half of the others have no draft token: there the residual is all of p.
    """
    batch = case(requests, 1, vocab, torch.float32, greedy=0)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab, (requests, 1), generator=generator)
    by_block = torch.randn(requests, 1, -(-vocab // 1024), generator=generator).repeat_interleave(1024, 2)[..., :vocab]
    by_token = torch.randn(requests, 1, vocab, generator=generator)
    draft = batch.target_logits[:, :1]
    if closeness == torch.inf:
        by_block[..., :1024].abs_()
        draft = torch.where(by_block > 0, -torch.inf, draft)
    else:
        draft = draft + closeness * (by_block + by_token / 10)
    target = batch.target_logits.scatter(2, ids[..., None].expand(requests, 2, 1), -torch.inf)
    temperature = torch.full((requests,), 0.7)
    return replace(batch, target_logits=target, draft_logits=draft, draft_token_ids=ids, temperature=temperature)


def orders(counts: list[int]) -> Any:
    """Return all orders of the steps of programs, given the number of steps of each."""
    if not any(counts):
        yield []
    for program, count in enumerate(counts):
        if count:
            for rest in orders([c - (p == program) for p, c in enumerate(counts)]):
                yield [program, *rest]


def every(cases: Any, most: int) -> list:
    """Return at most `most` of the cases, evenly spread."""
    cases = list(cases)
    return cases[:: 1 + len(cases) // most]


@contextmanager
def in_reverse() -> Iterator[None]:
    """Run the programs of a launch from the last to the first; in the interpreter only."""
    from triton.runtime.interpreter import interpreter_builder as builder

    set_grid_idx = builder.set_grid_idx

    def set_reversed(*index: int) -> None:
        set_grid_idx(*[size - 1 - i for size, i in zip(builder.grid_dim, index)])

    with mock.patch.object(builder, "set_grid_idx", set_reversed):
        yield


def in_question(requests: int, drafts: int, vocab: int, dtype: torch.dtype = torch.float32) -> Case:
    """Return a batch where many numbers of drafts depend on residual masses, so that nothing is decided early."""
    batch = case(requests, drafts, vocab, dtype, greedy=0, seed=3)
    generator = torch.Generator().manual_seed(4)
    target = batch.target_logits.float() / 3
    draft = target[:, :drafts] + torch.randn(requests, drafts, vocab, generator=generator)
    ids = torch.multinomial(draft.flatten(0, 1).softmax(-1), 1, generator=generator).view(requests, drafts)
    temperature = torch.ones(requests)
    return replace(
        batch,
        target_logits=target.to(dtype),
        draft_logits=draft.to(dtype),
        draft_token_ids=ids,
        temperature=temperature,
    )
