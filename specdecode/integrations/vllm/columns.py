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

from torch import Tensor, nn

from specdecode import Adjustments, RejectionSampler, SamplerOutput, VocabShard
from specdecode.adjustments import WORD
from specdecode.integrations.adapters import Fallbacks
from specdecode.integrations.vllm.adjusting import StepRows
from specdecode.integrations.vllm.compiling import compile_all
from specdecode.integrations.vllm.contract import PARALLEL, unknown_names
from specdecode.integrations.vllm.needs import (
    LOGPROBS,
    PROCESSORS,
    TRUNCATES,
    adjusted,
    for_drafts,
    needs_in,
    requested,
    values_of,
    with_masked_drafts,
)
from specdecode.integrations.vllm.reporting import logger
from specdecode.noise import BLOCK_SIZE

LAYERS = "vllm.model_executor.layers.vocab_parallel_embedding"
OWN_TOKENS = "specdecode: this rank verifies tokens %d to %d of %d; no logits are gathered"
ROWS = "target_logits", "draft_logits"
WHOLE_ROWS = "vLLM gathers the logits of such a step on every rank"
NEED_ROWS = {PROCESSORS: "logits processors", LOGPROBS: "log-probabilities"}


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

    def of(self, rows: Tensor) -> Tensor:
        """Return this rank's columns of whole rows."""
        return rows[..., self.start : self.end]

    def of_adjustments(self, added: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's columns of what changes logits, as `adjusted` returns it: views."""
        if not added:
            return added
        whole: Adjustments = added["adjustments"]
        words, tokens = slice(self.start // WORD, -(-self.end // WORD)), slice(self.start, self.end)
        places = {"prompt_mask": words, "output_counts": tokens, "allowed_mask": words}
        rows = {name: getattr(whole, name) for name in places}
        own = {name: each[:, places[name]] for name, each in rows.items() if each is not None}
        return {"adjustments": whole._replace(**own)}


class VerifiedColumns:
    """Mixed into vLLM's `RejectionSampler`: it verifies a step of which this rank's columns alone have been computed."""

    columns: Columns | None = None

    # What the class has that this is mixed into:
    call_of: Callable[..., dict[str, Any]]
    output_of: Callable[..., SamplerOutput]
    sampler: Any

    def prepare_columns(self, call: dict[str, Any]) -> None:
        """Compile what verifies columns in steps like a call of whole rows: on every rank in the same step."""
        if self.columns is not None:
            rows = {name: self.columns.of(call[name]) for name in ROWS if call[name] is not None}
            given = call | rows, self.sampler, self.columns.of_adjustments
            plain, truncated = compile_all(self.columns.verifier, *given)
            self.columns.why_not = plain, truncated or why_not_cut(self.columns.verifier.shard, call["target_logits"])

    def verify_columns(
        self, logits: Tensor, drafts: Tensor, where: tuple[Any, ...], needs: int, rows: StepRows
    ) -> SamplerOutput:
        """Verify a step.

        Args:
            logits: [num_rows, end - start].
            drafts: as `call_of` takes them.
            where: likewise; its draft logits are whole rows.
            needs: of the requests.
            rows: of the step.
        """
        columns = self.columns
        assert columns is not None
        draft_rows = None if where[0] is None else columns.of(where[0])
        sampling = for_drafts(requested(values_of(self.sampler), needs), draft_rows)
        added = adjusted(self.sampler, needs, rows)
        if draft_rows is not None and rows.input_ids[1:].data_ptr() != drafts.data_ptr():
            drafts = with_masked_drafts(drafts, rows.input_ids[1:], None, added.get("adjustments"))
        sampling |= columns.of_adjustments(added)
        return self.output_of(self.call_of(logits, drafts, draft_rows, *where[1:]), sampling, None, columns.verifier)


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
            columns.gathered.add(why_whole, WHOLE_ROWS)
            return super().sample(*given)  # type: ignore[misc]
        with columns.in_place_of_rows(self.model):
            return super().sample(*given)  # type: ignore[misc]

    @functools.cached_property
    def columns(self) -> Columns | None:
        """What verifies columns; None if whole rows are verified in all steps."""
        group, verification = importlib.import_module(PARALLEL).get_tp_group(), self.rejection_sampler
        if group.world_size == 1:
            return None
        processor, head = applied_in(self.model)
        why_not = why_not_columns(self, processor, head, group.world_size)
        if why_not is not None:
            logger.info("specdecode: vLLM gathers the logits of all steps on every rank, with %s", why_not)
            return None
        start, end = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
        shard = VocabShard(group.device_group, start, head.org_vocab_size)
        verifier = RejectionSampler(verification.verifier.method, shard=shard)
        logger.info(OWN_TOKENS, start, end - 1, head.org_vocab_size)
        local = getattr(self.model, "compute_logits_local", None) or StandIn(self.model, ungathered).compute_logits
        columns = verification.columns = Columns(local, start, end, verifier)
        if verification.report is not None:
            verification.report.gathered = columns.gathered
        return columns

    def why_whole(self, input_batch: Any, grammar_output: Any) -> str | None:
        """Return why a step needs whole rows, or None."""
        if grammar_output is not None and not getattr(self, "reads_grammars", False):
            return "grammars"
        if self.sampler.compute_nans:
            return "VLLM_COMPUTE_NANS_IN_LOGITS"
        needs = needs_in(self.sampler, input_batch.idx_mapping_np)
        for need, reason in NEED_ROWS.items():
            if needs & need:
                return reason
        assert self.columns is not None
        return self.columns.why_not[bool(needs & TRUNCATES)]


class StandIn:
    """Stands for a model in a call of the model's own `compute_logits`, with another use of the logits processor.

    It has what a method needs that does nothing but apply a logits processor to a head: processors, heads, other models in
    it. Whatever else the method asks it for raises an error.

    Args:
        model: vLLM's.
        use: called with the processor, and what the method calls that with, in place of the processor.
    """

    def __init__(self, model: nn.Module, use: Callable[..., Any]) -> None:
        self._model, self._use = model, use

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name, None)
        if name == "compute_logits" and inspect.ismethod(value):
            return functools.partial(value.__func__, self)
        if name == "logits_processor":
            return functools.partial(self._use, value)
        if hasattr(value, "shard_indices"):
            return value
        if isinstance(value, nn.Module):
            return StandIn(value, self._use)
        raise LookupError(name)  # no AttributeError: for that, a method may have a default


def ungathered(processor: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Apply a logits processor, and leave out that it gathers."""
    logits: Tensor = processor(*args, **kwargs, skip_gather=True)
    return logits


def applied_in(model: nn.Module) -> tuple[Any, Any]:
    """Return the logits processor and the head of a model whose `compute_logits` applies one to the other, and no more.

    Else two None: if it asks the model for anything else, or does anything with hidden states or logits. In this call plain
    objects stand for both, with which nothing can be computed.
    """
    rows, logits, applied = object(), object(), []

    def note(processor: Any, lm_head: Any, hidden_states: Any, embedding_bias: Tensor | None = None) -> object:
        if hidden_states is not rows or not hasattr(lm_head, "shard_indices") or not hasattr(processor, "_get_logits"):
            raise LookupError
        applied.append((processor, lm_head))
        return logits

    try:
        result = StandIn(model, note).compute_logits(rows)
    except Exception:  # of any kind: the method may do anything
        result = None
    return applied[0] if result is logits and len(applied) == 1 else (None, None)


def why_not_columns(runner: Any, processor: Any, head: Any, size: int) -> str | None:
    """Return why a model runner cannot verify columns in any step, or None.

    Args:
        runner: vLLM's.
        processor: the logits processor of its model; None: the model is not known to do no more than apply it.
        head: likewise.
        size: ranks.
    """
    if getattr(runner, "batch_sharder", None) is not None:
        return "batch-sharded sampling"
    if processor is None:
        return f"{type(runner.model).__name__}, whose compute_logits does more than apply a head"
    if new := unknown_names(processor.forward) or unknown_names(processor._get_logits):
        return f"{type(processor).__name__}, which does more than is known here ({', '.join(new)})"
    if runner.sampler.return_sampling_mask:
        return "return_sampling_mask"
    vocab_size = runner.sampler.sampling_states.vocab_size
    if head.tp_size != size or processor.logits_as_input:
        return "a head that is not divided"
    if not head.org_vocab_size == processor.org_vocab_size == vocab_size:
        return "a head of other tokens than the vocabulary's"
    if head.num_embeddings_per_partition % BLOCK_SIZE != 0:
        return f"columns that do not start at a multiple of {BLOCK_SIZE}"
    draft_logits = getattr(runner.speculator, "draft_logits", None)
    if draft_logits is not None and draft_logits.shape[-1] < vocab_size:
        return "a draft model of fewer tokens"
    rule: str | None = runner.rejection_sampler.other_rule()
    return rule


def why_not_cut(shard: VocabShard | None, logits: Tensor) -> str | None:
    """Return why columns of truncated steps are not verified, or None: without symmetric memory rows would be gathered."""
    if shard is None or not logits.is_cuda or shard.transport_on(logits.device).is_symmetric:
        return None
    return "truncation, where GPUs cannot write to each other's memory"


def pad_to_blocks() -> None:
    """Have vLLM pad vocabularies so that every rank's columns start at a multiple of 1,024.

    The padding is part of the key by which vLLM finds a compiled model on disk: code compiled without the switch has the
    sizes of other columns in it. A format whose files hold what each rank holds is not padded, and rows are gathered.
    """
    modules: list[Any] = [importlib.import_module(name) for name in (LAYERS, "vllm.config", "vllm.envs")]
    layers, config, environment = modules
    make, factors = layers.VocabParallelEmbedding.__init__, environment.compile_factors
    signature, padding = inspect.signature(make), dict[str, int]()

    @functools.wraps(make)
    def make_padded(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        is_divided = not bound.arguments.get("disable_tp") and bound.arguments.get("parallel_group") is None
        is_divided = is_divided and not is_loaded_by_rank(config.get_current_vllm_config_or_none())
        size = importlib.import_module(PARALLEL).get_tensor_model_parallel_world_size() if is_divided else 1
        if size > 1 and bound.arguments["padding_size"] == layers.DEFAULT_VOCAB_PADDING_SIZE:
            bound.arguments["padding_size"] = padding["SPECDECODE_VOCAB_PADDING"] = BLOCK_SIZE * size
        make(*bound.args, **bound.kwargs)

    layers.VocabParallelEmbedding.__init__ = make_padded
    environment.compile_factors = lambda: factors() | padding


def is_loaded_by_rank(config: Any) -> bool:
    """Return whether the weights of a model come from files of what each rank holds, whose sizes have to stay."""
    return config is not None and config.load_config.load_format in {"sharded_state", "runai_streamer_sharded"}
