"""The sampler under torch.compile: two operators that the compiler does not look into, one to verify and one to draw.

Compiled code that calls the sampler calls such an operator, which then checks the arguments and runs the backend as usual.
Calls that are not being compiled never come here. A call with a shard of the vocabulary is an error.

An argument of an operator is either a tensor or a number, so temperature, truncation and seeds are two arguments each, of
which one is used. What an operator cannot take is refused by another one, which raises the error when the compiled code
runs: an error in the compiled function itself would make the compiler try its parts, one after the other. Seeds that the
caller does not give are drawn outside the operator: the compiler may replace two equal calls of an operator by one, and does
not do that to PyTorch's own random numbers.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from specdecode import backends, validation
from specdecode.backends import Backend
from specdecode.batch import Logprobs, RowBatch, SamplerOutput, VerificationBatch
from specdecode.checks import MOST_DRAFT_TOKENS, check_count, check_logits, check_seeds, draw_seeds
from specdecode.noise import SELECT
from specdecode.packing import Packing, check_starts
from specdecode.sampling import Sampling, check_draft_sampling
from specdecode.sharding import VocabShard
from specdecode.synthetic import AcceptanceSchedule
from specdecode.validation import Validate


def verify(
    method: str,
    backend: Backend,
    schedule: AcceptanceSchedule | None,
    validate: Validate | None,
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None,
    draft_logsumexp: Tensor | None,
    temperature: float | Tensor,
    seeds: int | Tensor | None,
    positions: Tensor | None,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
    draft_sampling: Sampling | None,
    draft_cutoff: Tensor | None,
    logprobs: Logprobs | None,
    draft_vocab_ids: Tensor | None,
    shard: VocabShard | None,
    *where: Any,
) -> SamplerOutput:
    """Verify one step of drafts in code that is being compiled; arguments are those of a call of the sampler.

    In a packed call `where` is row_starts, num_draft_tokens, slots and row_positions.
    """
    joint_rates = [] if schedule is None else list(schedule.joint_rates)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    row_starts, num_draft_tokens, slots, row_positions = where or (None, 0, None, None)
    errors: list[str] = []
    with torch.no_grad():
        # In place of an argument that is refused any other will do: it is traced, but not used.
        _fails(errors, check_no_shard, shard)
        _fails(errors, check_numbers, sampling)
        if draft_sampling is not None and (
            _fails(errors, check_draft_sampling, draft_sampling, draft_logits)
            or _fails(errors, check_numbers, draft_sampling, "draft_sampling.")
        ):
            draft_sampling = None
        if where and _fails(errors, check_count, "num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS, 0):
            num_draft_tokens = 0
        if where and _fails(errors, check_starts, row_starts):
            row_starts = target_logits.new_zeros(1, dtype=torch.int64)
        batch = target_logits.shape[:1] if row_starts is None else (row_starts.shape[0] - 1,)
        tensor_and_number = _seeds(errors, seeds, batch, target_logits.device)
        tensors = _verify(
            method,
            backend,
            joint_rates,
            _refused(target_logits, errors),
            draft_token_ids,
            draft_logits,
            draft_logsumexp,
            *_tensors_and_numbers(sampling),
            *(([], []) if draft_sampling is None else _tensors_and_numbers(draft_sampling)),
            *tensor_and_number,
            positions,
            draft_cutoff,
            draft_vocab_ids,
            logprobs,
            row_starts,
            num_draft_tokens,
            slots,
            row_positions,
            seeds is None,
            validate=validate,
        )
        # Not by `_replace`: PyTorch 2.11 cannot compile a function that returns what that makes.
        return SamplerOutput(*(tensors[:4] if logprobs is None else tensors))


def sample(
    backend: Backend,
    domains: tuple[int, int],
    shard: VocabShard | None,
    validate: Validate | None,
    logits: Tensor,
    temperature: float | Tensor,
    seeds: int | Tensor | None,
    positions: Tensor | None,
    top_k: int | Tensor | None,
    top_p: float | Tensor | None,
    min_p: float | Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row in code that is being compiled; return what a backend's `sample` returns."""
    sampling = Sampling(temperature, top_k, top_p, min_p)
    errors: list[str] = []
    with torch.no_grad():
        _fails(errors, check_no_shard, shard)
        _fails(errors, check_numbers, sampling)
        tensor_and_number = _seeds(errors, seeds, logits.shape[:1], logits.device)
        token_ids, logsumexp, cutoff = _sample(
            backend,
            *domains,
            _refused(logits, errors),
            *_tensors_and_numbers(sampling),
            *tensor_and_number,
            positions,
            validate=validate,
        )
        return token_ids, logsumexp, cutoff if _truncates(sampling, logits.shape[-1]) else None


def draft(
    backend: Backend,
    domains_of: Callable[[int], tuple[int, int]],
    offset: int,
    shard: VocabShard | None,
    validate: Validate | None,
    logits: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one draft per row, as `sample` does, with noise of the domains of its offset, which must have some."""
    errors: list[str] = []
    domains = SELECT if _fails(errors, domains_of, offset) else domains_of(offset)
    return sample(backend, domains, shard, validate, _refused(logits, errors), *arguments)


def _tensors_and_numbers(sampling: Sampling) -> tuple[list[Tensor | None], list[float]]:
    """Return the fields that are tensors, None in place of the others; and the numbers, neutral in place of None."""
    tensors = [field if isinstance(field, Tensor) else None for field in sampling]
    neutral = (1.0, 0.0, 1.0, 0.0)
    numbers = [float(field) if isinstance(field, (int, float)) else other for field, other in zip(sampling, neutral)]
    return tensors, numbers


def _truncates(sampling: Sampling, vocab: int) -> bool:
    """Return whether a call has cutoffs: not if top_k, top_p and min_p are numbers that leave nothing out."""
    tensors, (_, top_k, top_p, min_p) = _tensors_and_numbers(sampling)
    return any(tensor is not None for tensor in tensors[1:]) or 0 < top_k < vocab or top_p != 1 or min_p != 0


def _sampling_of(tensors: Sequence[Tensor | None], numbers: Sequence[float]) -> Sampling:
    temperature, top_k, top_p, min_p = (
        number if tensor is None else tensor for tensor, number in zip(tensors, numbers)
    )
    return Sampling(temperature, top_k if isinstance(top_k, Tensor) else int(top_k), top_p, min_p)


def _seeds(
    errors: list[str], seeds: int | Tensor | None, batch: tuple[int, ...], device: torch.device
) -> tuple[Tensor | None, int]:
    """Return seeds as a tensor and as a number, of which an operator uses one; fresh ones if none are given."""
    if seeds is None:
        return draw_seeds(batch, device), 0
    if isinstance(seeds, Tensor):
        return seeds, 0
    return None, 0 if _fails(errors, check_seeds, seeds, 0, device) else seeds


def _fails(errors: list[str], check: Callable[..., object], *arguments: object) -> bool:
    """Return whether a check raises, and then add its error to the list."""
    try:
        check(*arguments)
    except (TypeError, ValueError) as error:
        errors.append(f"{type(error).__name__}: {error.args[0]}")
        return True
    return False


def check_no_shard(shard: VocabShard | None) -> None:
    """Raise if there is one."""
    if shard is not None:
        raise ValueError("shard: calls with a shard cannot be compiled; put them in torch.compiler.disable")


def check_numbers(sampling: Sampling, of: str = "") -> None:
    """Raise unless each field is a tensor or a number; `of` comes before its name in the error."""
    for name, field in zip(Sampling._fields, sampling):
        if not (isinstance(field, Tensor) or _is_number(name, field)):
            expected = "a number or a tensor in code that is compiled"
            raise TypeError(f"{of}{name}: expected {expected}, got {type(field).__name__}")


def _is_number(name: str, field: object) -> bool:
    return type(field) is int or (type(field) is float and name != "top_k") or (field is None and name != "temperature")


def _refused(logits: Tensor, errors: list[str]) -> Tensor:
    """Return the logits, of a step that raises the first error if there are any."""
    refused: Tensor = _refuse(logits, errors[0]) if errors else logits
    return refused


@torch.library.custom_op("specdecode::refuse", mutates_args=())
def _refuse(logits: Tensor, error: str) -> Tensor:
    """Raise an error, given its type and its message."""
    kind, _, message = error.partition(": ")
    raise (ValueError if kind == "ValueError" else TypeError)(message)


@_refuse.register_fake
def _(logits: Tensor, error: str) -> Tensor:
    return torch.empty_like(logits)


@torch.library.custom_op("specdecode::verify", mutates_args=())
def _verify(
    method: str,
    backend: str,
    joint_rates: Sequence[float],
    target_logits: Tensor,
    draft_token_ids: Tensor,
    draft_logits: Tensor | None,
    draft_logsumexp: Tensor | None,
    sampling_tensors: Sequence[Tensor | None],
    sampling_numbers: Sequence[float],
    draft_sampling_tensors: Sequence[Tensor | None],
    draft_sampling_numbers: Sequence[float],
    seeds: Tensor | None,
    first_seed: int,
    positions: Tensor | None,
    draft_cutoff: Tensor | None,
    draft_vocab_ids: Tensor | None,
    logprobs: str | None,
    row_starts: Tensor | None,
    num_draft_tokens: int,
    slots: Tensor | None,
    row_positions: Tensor | None,
    seeds_are_drawn: bool,
    *,
    validate: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from specdecode.sampler import RejectionSampler  # which imports this module

    schedule = AcceptanceSchedule.from_rates(joint_rates) if joint_rates else None
    how: Any = {"backend": backend, "schedule": schedule, "validate": validate}
    sampler = RejectionSampler(cast("Any", method), **how)
    temperature, *truncation = _sampling_of(sampling_tensors, sampling_numbers)
    drafts = _sampling_of(draft_sampling_tensors, draft_sampling_numbers) if draft_sampling_numbers else None
    seed = first_seed if seeds is None else seeds
    tensors = target_logits, draft_token_ids, draft_logits, draft_logsumexp
    numbers: Any = positions, *truncation, drafts, draft_cutoff, logprobs, draft_vocab_ids, None
    others: Any = *numbers, row_starts, num_draft_tokens, slots, row_positions
    if row_starts is None or not seeds_are_drawn:
        return _tensors_of(sampler._verify(VerificationBatch.check(*tensors, temperature, seed, *others)))
    # Drawn seeds are by request. A caller's would be by slot: so they are put in after the checks.
    batch = VerificationBatch.check(*tensors, temperature, 0, *others)
    packing = cast("Packing", batch.packing)._replace(seeds_by_request=True)
    return _tensors_of(sampler._verify(batch._replace(seeds=seed, packing=packing)))


def _tensors_of(output: SamplerOutput) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return an output as an operator can, as tensors alone: one of no elements for log-probabilities not asked for."""
    of_tokens = output.token_ids.new_empty(0, dtype=torch.float32) if output.logprobs is None else output.logprobs
    return *output[:4], of_tokens


@_verify.register_fake
def _(
    method: str,
    backend: str,
    joint_rates: Sequence[float],
    target_logits: Tensor,
    *others: Any,
    validate: str | None = None,
) -> SamplerOutput:
    *_, logprobs, row_starts, num_draft_tokens, _slots, _row_positions, _seeds_are_drawn = others
    if row_starts is None:
        batch, rows, _vocab = check_logits("target_logits", target_logits, ("batch", "num_draft_tokens + 1", "vocab"))
    else:
        check_logits("target_logits", target_logits, ("num_rows", "vocab"))
        batch, rows = row_starts.shape[0] - 1, num_draft_tokens + 1
    return SamplerOutput(
        target_logits.new_empty((batch, rows), dtype=torch.int64),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty(batch, dtype=torch.int32),
        target_logits.new_empty(batch, dtype=torch.bool),
        target_logits.new_empty(0 if logprobs is None else (batch, rows), dtype=torch.float32),
    )


@torch.library.custom_op("specdecode::sample", mutates_args=())
def _sample(
    backend: str,
    block_domain: int,
    token_domain: int,
    logits: Tensor,
    sampling_tensors: Sequence[Tensor | None],
    sampling_numbers: Sequence[float],
    seeds: Tensor | None,
    first_seed: int,
    positions: Tensor | None,
    *,
    validate: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    temperature, *truncation = _sampling_of(sampling_tensors, sampling_numbers)
    seed = first_seed if seeds is None else seeds
    batch = RowBatch.check(logits, cast("Any", temperature), seed, positions, *cast("Any", truncation))
    if validate is not None:
        validation.check_rows(batch)
    chosen = backends.choose(cast("Backend", backend), batch.logits)
    token_ids, logsumexp, *cutoff = chosen.sample(batch, (block_domain, token_domain))
    # A number that leaves nothing out has no cutoff, which -1 says, too.
    is_truncated = cutoff and cutoff[0] is not None
    return token_ids, logsumexp, cutoff[0] if is_truncated else torch.full_like(token_ids, -1)


@_sample.register_fake
def _(
    backend: str, block_domain: int, token_domain: int, logits: Tensor, *_: object, validate: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _vocab = check_logits("logits", logits, ("batch", "vocab"))
    token_ids = logits.new_empty(batch, dtype=torch.int64)
    return token_ids, logits.new_empty(batch, dtype=torch.float32), torch.empty_like(token_ids)
