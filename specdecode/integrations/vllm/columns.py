"""Tensor parallelism in vLLM: each rank verifies its own columns of the logits, and a step that allows it gathers none.

vLLM has each rank compute the logits of a part of the vocabulary, its *columns*, and then gathers whole rows on every rank.
Here ranks exchange what verification needs of them: [`VocabShard`][specdecode.VocabShard].

Kernels verify columns that start at a multiple of 1,024. vLLM pads the vocabulary to a multiple of 64 and divides it evenly;
here it pads to 1,024 for each rank, at most 1,024 rows of the head more on each.
"""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from specdecode import RejectionSampler, SamplerOutput, VocabShard
from specdecode.integrations.adapters import Fallbacks
from specdecode.integrations.vllm.reporting import Report, logger
from specdecode.integrations.vllm.sampling import (
    ADJUSTS,
    LOGPROBS,
    PROCESSORS,
    TRUNCATES,
    for_drafts,
    needs_in,
    requested,
    values_of,
)
from specdecode.noise import BLOCK_SIZE

LAYERS = "vllm.model_executor.layers.vocab_parallel_embedding"
PARALLEL = "vllm.distributed.parallel_state"
OWN_TOKENS = "specdecode: this rank verifies tokens %d to %d of %d; no logits are gathered"
NEED_ROWS = {PROCESSORS: "logits processors", LOGPROBS: "log-probabilities", ADJUSTS: "penalties or biases"}


class Columns:
    """Holds what this rank needs to compute and verify its columns of the logits.

    Args:
        compute: of hidden states, [num_rows, hidden_size], this rank's logits, padded.
        start: the first token.
        end: beyond the last one.
        verifier: verifies them.
    """

    def __init__(self, compute: Callable[[Tensor], Tensor], start: int, end: int, verifier: RejectionSampler) -> None:
        self.compute, self.start, self.end, self.verifier = compute, start, end, verifier
        self.are_computed = False
        """Whether the logits of the step are this rank's columns, not whole rows."""
        self.gathered = Fallbacks(logger)
        self.why_not: tuple[str | None, str | None] = ("kernels that are not compiled yet",) * 2
        """Why columns of steps that are not truncated are not verified, and of truncated ones; None where they are."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Return this rank's logits, [num_rows, end - start]."""
        self.are_computed = True
        return self.compute(hidden_states)[:, : self.end - self.start]

    @contextlib.contextmanager
    def in_place_of_rows(self, model: Any) -> Iterator[None]:
        """Have a model compute this rank's columns where it is asked for logits."""
        vars(model)["compute_logits"] = self
        try:
            yield
        finally:
            del vars(model)["compute_logits"]
            self.are_computed = False

    def of(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a call of whole rows as one of this rank's columns; draft rows are whole in any call."""
        rows = {name: call[name] for name in ("target_logits", "draft_logits") if call[name] is not None}
        length = self.end - self.start
        return call | {
            name: each if each.shape[-1] == length else each[..., self.start : self.end] for name, each in rows.items()
        }


class VerifiedColumns:
    """Mixed into vLLM's `RejectionSampler`: it verifies a step of which this rank's columns alone have been computed."""

    columns: Columns | None = None

    # What the class has that this is mixed into:
    call_of: Callable[..., dict[str, Any]]
    output_of: Callable[..., SamplerOutput]
    report: Report | None
    sampler: Any

    def verify_columns(
        self,
        logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        pos: Tensor,
        cu_num_logits: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Verify a step, with the arguments and results of `_verify`."""
        columns = self.columns
        assert columns is not None
        if draft_logits is not None:
            draft_logits = (
                None if columns.verifier.method == "strict" else draft_logits[..., columns.start : columns.end]
            )
        call = self.call_of(logits, draft_sampled[1:], draft_logits, pos, cu_num_logits, idx_mapping)
        sampling = for_drafts(requested(values_of(self.sampler), needs_in(self.sampler, idx_mapping_np)), draft_logits)
        output = self.output_of(call, sampling, None, columns.verifier)
        if self.report is not None:
            self.report.verified(output)
        return logits, output.token_ids, output.num_tokens


class ColumnSampling:
    """Mixed into vLLM's V2 model runner: it computes this rank's columns alone where a step allows it."""

    # What vLLM's class has:
    model: Any
    rejection_sampler: Any
    sampler: Any

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """Sample a step, with vLLM's arguments and results."""
        given = hidden_states, input_batch, grammar_output
        columns = self.columns if isinstance(self.rejection_sampler, VerifiedColumns) else None
        if columns is None or input_batch.num_draft_tokens == 0:
            return super().sample(*given)  # type: ignore[misc]
        why_whole = self.why_whole(input_batch, grammar_output)
        if why_whole is not None:
            columns.gathered.add(why_whole, "vLLM gathers the logits of such a step on every rank")
            return super().sample(*given)  # type: ignore[misc]
        with columns.in_place_of_rows(self.model):
            return super().sample(*given)  # type: ignore[misc]

    @functools.cached_property
    def columns(self) -> Columns | None:
        """What verifies columns; None if whole rows are verified in all steps."""
        group, verification = importlib.import_module(PARALLEL).get_tp_group(), self.rejection_sampler
        if group.world_size == 1:
            return None
        why_not = why_not_columns(self)
        if why_not is not None:
            logger.info("specdecode: vLLM gathers the logits of all steps on every rank, with %s", why_not)
            return None
        indices, vocab_size = self.model.lm_head.shard_indices, verification.sampler.sampling_states.vocab_size
        start, end = (min(each, vocab_size) for each in (indices.org_vocab_start_index, indices.org_vocab_end_index))
        shard = VocabShard(group.device_group, start, vocab_size)
        verifier = RejectionSampler(verification.verifier.method, shard=shard)
        logger.info(OWN_TOKENS, start, end - 1, vocab_size)
        columns = verification.columns = Columns(self.model.compute_logits_local, start, end, verifier)
        return columns

    def why_whole(self, input_batch: Any, grammar_output: Any) -> str | None:
        """Return why a step needs whole rows, or None."""
        if grammar_output is not None:
            return "grammars"
        if self.sampler.compute_nans:
            return "VLLM_COMPUTE_NANS_IN_LOGITS"
        needs = needs_in(self.sampler, input_batch.idx_mapping_np)
        for need, reason in NEED_ROWS.items():
            if needs & need:
                return reason
        assert self.columns is not None
        return self.columns.why_not[bool(needs & TRUNCATES)]


def why_not_columns(runner: Any) -> str | None:
    """Return why a model runner cannot verify columns in any step, or None."""
    if getattr(runner, "batch_sharder", None) is not None:
        return "batch-sharded sampling"
    if not hasattr(runner.model, "compute_logits_local"):
        return f"{type(runner.model).__name__}, which has no compute_logits_local"
    if runner.sampler.return_sampling_mask:
        return "return_sampling_mask"
    if runner.model.lm_head.num_embeddings_per_partition % BLOCK_SIZE != 0:
        return f"columns that do not start at a multiple of {BLOCK_SIZE}"
    draft_logits = getattr(runner.speculator, "draft_logits", None)
    if draft_logits is not None and draft_logits.shape[-1] < runner.sampler.sampling_states.vocab_size:
        return "a draft model of fewer tokens"
    rule: str | None = runner.rejection_sampler.other_rule()
    return rule


def pad_to_blocks() -> None:
    """Have vLLM pad vocabularies so that every rank's columns start at a multiple of 1,024."""
    layers: Any = importlib.import_module(LAYERS)
    make = layers.VocabParallelEmbedding.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_padded(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        is_divided = not bound.arguments.get("disable_tp") and bound.arguments.get("parallel_group") is None
        size = importlib.import_module(PARALLEL).get_tensor_model_parallel_world_size() if is_divided else 1
        if size > 1 and bound.arguments["padding_size"] == layers.DEFAULT_VOCAB_PADDING_SIZE:
            bound.arguments["padding_size"] = BLOCK_SIZE * size
        make(*bound.args, **bound.kwargs)

    layers.VocabParallelEmbedding.__init__ = make_padded
