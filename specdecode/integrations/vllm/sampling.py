"""The sampler of vLLM's V2 model runner: needs and parameters of requests, and the tokens of steps without drafts.

A call *lists* a row if it also returns the row's likeliest tokens (`top_logprobs`) or its kept set (`kept_sets`), from which
vLLM's log-probabilities and sampling masks are made.
"""

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdecode import Adjustments, RejectionSampler, backends, eager
from specdecode.arguments import check_verification
from specdecode.batch import MOST_KEPT, MOST_TOP_LOGPROBS
from specdecode.integrations.engine import warm_up
from specdecode.integrations.vllm.adjusting import Known, known_processors
from specdecode.integrations.vllm.compat import group_of, logger
from specdecode.integrations.vllm.grammars import StepGrammar, apply_grammar
from specdecode.integrations.vllm.steps import Requests, StepInputs

PROCESSORS, TRUNCATES, LOGPROBS, ADJUSTS, UNLISTED, WIDE, MASKS = 1, 2, 4, 8, 16, 32, 64
"""The needs of a request, in bits.

| bit | the request |
|---|---|
| `PROCESSORS` | has unknown logits processors: it needs vLLM's copy of logits |
| `TRUNCATES` | truncates, and is not greedy |
| `LOGPROBS` | requests log-probabilities |
| `ADJUSTS` | has penalties or biases |
| `UNLISTED` | requests log-probabilities that calls cannot list: more than 20 a token, or of a greedy request |
| `WIDE` | may keep more than 1,024 tokens, more than a kept set lists |
| `MASKS` | has a list of allowed tokens, a minimum length, bad words or a thinking budget |
"""

LISTED_MODE = "processed_logprobs"
"""The only `logprobs_mode` whose log-probabilities calls can list: log-probabilities after truncation."""

MOST_SPLIT = 0.25
"""The largest share of a step's requests that vLLM prepares apart from the others. The copies of their rows then need no
more memory than vLLM's own copy of all rows."""

NO_NEED = SimpleNamespace(add_request=lambda request, params: False)
"""Stands in for vLLM's states that are applied here, so that vLLM finds no request that needs them."""


class SlotValues(NamedTuple):
    """Sampling parameters and seeds by slot, [num_slots] each."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor


class TokenSampling:
    """Mixin for vLLM's `Sampler`: records the needs of each request, and draws by seed for `"strict"`.

    vLLM's sampler draws the tokens of steps in which no request has a draft. For `"strict"` these tokens must use the
    same noise as all others, so that a request's text depends on its seed and not on which steps had drafts.
    """

    verifier: ClassVar[RejectionSampler]
    unknown: str | None = None
    """The reason to leave all steps to vLLM, because its methods use names that the tested versions do not; or None."""

    keeps_grammars: ClassVar[bool] = False
    """Whether grammar masks may be kept for a step, instead of being applied to the logits at once."""

    copies: SlotValues | None = None
    """The copies that `slot_values` returns; None after a new request."""

    grammar: StepGrammar | None = None
    """The step's grammar masks, if they were kept."""

    # What vLLM's class has:
    apply_sampling_params: Callable[..., Tensor]
    logits_processors: list[Any]
    logprobs_mode: str
    needs_logits_processing: np.ndarray
    return_sampling_mask: bool
    sampling_states: Any
    thinking_budget_state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.needs = np.zeros(len(self.needs_logits_processing), dtype=np.uint8)  # of the request in each slot
        config = kwargs.get("vllm_config", args[0] if args else None)
        self.shards_batches = bool(
            getattr(getattr(config, "parallel_config", None), "enable_batch_sharded_sampling", False)
        )

    @functools.cached_property
    def compiled_dtypes(self) -> set[torch.dtype]:
        """The dtypes of logits for which the kernels of steps without drafts are compiled."""
        return set()

    @functools.cached_property
    def known(self) -> Known | None:
        """The processors of vLLM that are applied here; None if one of them differs from the tested versions."""
        return known_processors(self)

    @functools.cached_property
    def reads_grammars(self) -> bool:
        """Whether steps verified here read grammar masks; not if vLLM counts NaN, which it does after applying them."""
        return self.keeps_grammars and self.known is not None and not getattr(self, "compute_nans", False)

    def takes(self, num_draft_tokens: int) -> bool:
        """Return whether this package verifies steps with this number of drafts, unless their requests need vLLM."""
        return self.unknown is None and (num_draft_tokens > 0 or self.verifier.method == "strict")

    # ---- Needs of requests

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Record the needs of a request."""
        # vLLM keeps one flag for all processing, so its method first sees only the unknown processors.
        known, states = self.known, self.sampling_states
        processors, thinking = getattr(self, "logits_processors", []), getattr(self, "thinking_budget_state", None)
        self.sampling_states = NO_NEED
        if known is not None:
            self.logits_processors = [each for each in processors if all(each is not one for one in known.processors)]
            self.thinking_budget_state = NO_NEED
        try:
            super().add_request(req_idx, sampling_params)  # type: ignore[misc]
        finally:
            self.sampling_states = states
            if known is not None:
                self.logits_processors, self.thinking_budget_state = processors, thinking
        adjusts = masks = restores = False
        if known is not None:
            adjusts, masks, restores = known.add_request(req_idx, sampling_params)
        # A minimum length gives way to a grammar that allows only stop tokens: vLLM applies both if masks are not read here.
        others = bool(self.needs_logits_processing[req_idx]) or (restores and not self.reads_grammars)
        needs = PROCESSORS * others | ADJUSTS * adjusts | MASKS * masks
        self.needs_logits_processing[req_idx] = states.add_request(req_idx, sampling_params) or needs > 0
        self.needs[req_idx] = needs | self.sampling_needs(req_idx)
        self.copies = None

    def sampling_needs(self, slots: Any) -> Any:
        """Return the needs that follow from sampling parameters, in bits, of one slot or of several slots."""
        states = self.sampling_states
        is_greedy, num_logprobs = states.temperature.np[slots] == 0, states.num_logprobs[slots]
        truncates = (states.top_k.np[slots] != states.vocab_size) | (states.top_p.np[slots] != 1)
        truncates = (truncates | (states.min_p.np[slots] != 0)) & ~is_greedy
        logprobs = num_logprobs >= 0
        # For a greedy request vLLM returns log-probabilities of the whole row, not truncated.
        unlisted = logprobs & is_greedy | (num_logprobs > MOST_TOP_LOGPROBS)
        wide = states.top_k.np[slots] > MOST_KEPT
        return TRUNCATES * truncates | LOGPROBS * logprobs | UNLISTED * unlisted | WIDE * wide

    def needs_in(self, slots: np.ndarray) -> int:
        """Return the needs of any of the requests in some slots, in bits."""
        return int(np.bitwise_or.reduce(self.needs[slots], initial=0))

    def why_processed(self, needs: int, lists: bool = False) -> str | None:
        """Return the reason why vLLM must process the logits of a step with these needs, or None.

        Args:
            needs: the needs of the step's requests, in bits.
            lists: whether calls can list what vLLM returns: log-probabilities or sampling masks.
        """
        if needs & PROCESSORS:
            return "logits processors that specdecode does not know"
        if needs & LOGPROBS and self.logprobs_mode in ("processed_logits", "processed_logprobs"):
            is_listed = lists and self.logprobs_mode == LISTED_MODE and not needs & (UNLISTED | ADJUSTS | MASKS)
            if not is_listed:
                return f"logprobs_mode {self.logprobs_mode!r}"
        if self.return_sampling_mask and not (lists and not needs & WIDE):
            return "return_sampling_mask"
        return None

    # ---- Sampling parameters

    def slot_values(self) -> SlotValues:
        """Return sampling parameters and seeds in device memory, copied again only after a new request.

        vLLM's own tensors are views of host memory, which each program of a kernel would read over the bus.
        """
        if self.copies is None:
            values = [getattr(self.sampling_states, name).gpu.clone() for name in SlotValues._fields]
            self.copies = SlotValues(*values)
        return self.copies

    def sampling_of(self, needs: int, step: StepInputs) -> dict[str, Any]:
        """Return the arguments for sampling from raw logits, by slot: truncation and adjustments."""
        return (self.truncated() if needs & TRUNCATES else self.whole()) | self.adjusted(needs, step)

    def whole(self) -> dict[str, Any]:
        """Return the sampling arguments without truncation, which would cost time even if neutral."""
        return {"temperature": self.slot_values().temperature}

    def truncated(self) -> dict[str, Any]:
        """Return the sampling arguments with all three limits, because each combination would need its own kernels."""
        values = self.slot_values()
        return {name: getattr(values, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    def of_processed(self) -> dict[str, Any]:
        """Return the sampling arguments for logits that vLLM has divided by the temperature and truncated.

        The temperature is then 1, or 0 for greedy requests.
        """
        return {"temperature": (self.slot_values().temperature != 0).to(torch.float32)}

    def adjusted(self, needs: int, step: StepInputs) -> dict[str, Any]:
        """Return the `adjustments` argument for a step's rows: masks, all penalties and biases, or both; {} for none."""
        known: Any = self.known
        grammar, mask = self.grammar, None
        if needs & MASKS or not (grammar is None or grammar.is_applied):
            # An applied grammar is passed too: if it allows only stop tokens, a minimum length does not exclude them.
            mask = known.limited_tokens(step, grammar)
        if needs & ADJUSTS:
            return {"adjustments": known.adjustments(mask)}
        return {} if mask is None else {"adjustments": Adjustments(allowed_mask=mask)}

    # ---- Kernels

    def listings(self) -> list[dict[str, Any]]:
        """Return the arguments of all calls that list, one dict for each combination of likeliest tokens and kept sets."""
        kept = [{"kept_sets": True}] if self.return_sampling_mask else []
        if self.logprobs_mode != LISTED_MODE:
            return kept
        # The kernels for one likeliest token serve any number of them.
        logprobs: list[dict[str, Any]] = [{"logprobs": "processed", "top_logprobs": count} for count in (0, 1)]
        return [*logprobs, *kept, *[one | more for one in logprobs for more in kept]]

    def compile_kernels(
        self, verifier: RejectionSampler, as_call: Callable[[dict[str, Any]], dict[str, Any]], step: StepInputs
    ) -> tuple[str | None, str | None]:
        """Compile the kernels of steps like `step`: truncated or not, with and without adjustments, with and without lists.

        Args:
            verifier: the sampler whose kernels are compiled.
            as_call: returns the arguments of `verifier.packed`, given the sampling arguments.
            step: a step with logits of the dtypes to compile for.

        Returns:
            The reasons why the kernels cannot take untruncated steps, and truncated steps; None where they can.
        """
        start = time.monotonic()
        calls = [as_call(self.whole()), as_call(self.truncated())]
        num_draft_tokens, device = calls[0]["num_draft_tokens"], step.logits.device
        others: list[dict[str, Any]] = [{}, *(self.listings() if num_draft_tokens > 0 else [])]
        if self.known is not None:
            mask = self.known.masks_of(len(step.logits), device)
            added = self.known.adjustments(None), self.known.adjustments(mask), Adjustments(allowed_mask=mask)
            # If vLLM returns sampling masks, every step with drafts lists kept sets.
            kept = {"kept_sets": True} if num_draft_tokens > 0 and self.return_sampling_mask else {}
            others += [kept | {"adjustments": each} for each in added]
        # The step's first request is enough: kernels are compiled for batches of any size.
        first = [call | {"row_starts": call["row_starts"][:2], "slots": call["slots"][:1]} for call in calls]
        why_not = [why_not_by_kernels(verifier, call) for call in first]
        to_compile = [call | more for call, reason in zip(first, why_not) if reason is None for more in others]
        if to_compile and self.known is not None and device.type == "cuda":
            self.known.limited_tokens(step.without_rows())  # the kernel that writes masks
        warm_up(verifier, to_compile, self.share)
        which = f"up to {num_draft_tokens} drafts a request" if num_draft_tokens > 0 else "no drafts"
        logger.info("specdecode: kernels for %s are compiled, in %.0f s", which, time.monotonic() - start)
        return why_not[0], why_not[1]

    def share(self) -> tuple[Any, ...]:
        """Return the fields of a `Share`, (rank, world size, barrier); () without a group.

        A rank compiles its share of the kernels, then loads the others from the cache. If ranks have no common cache, it
        compiles them too.
        """
        group = group_of(self)
        return () if group is None else (group.rank_in_group, group.world_size, group.barrier)

    # ---- Steps without drafts

    def sample(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        idx_mapping: Tensor,
        idx_mapping_np: np.ndarray,
        pos: Tensor,
        input_ids: Tensor,
        expanded_local_pos: Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        return_logprobs: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Draw one token per row, with vLLM's arguments and results."""
        slots = idx_mapping, idx_mapping_np, expanded_idx_mapping
        if self.verifier.method != "strict" or self.unknown is not None:
            given = logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, expanded_local_pos
            return super().sample(*given, seq_lens_upper_bound_np, return_logprobs)  # type: ignore[misc, no-any-return]
        starts, lengths = torch.arange(len(logits) + 1, device=logits.device), seq_lens_upper_bound_np
        step = StepInputs(logits, None, input_ids, pos, starts, *slots, expanded_local_pos, lengths, input_ids)
        needs = self.needs_in(idx_mapping_np)
        if self.why_processed(needs & ~LOGPROBS | LOGPROBS * return_logprobs) is None:
            sampling = self.sampling_of(needs, step)
        else:  # vLLM prepares the logits; the tokens are still drawn here, so the noise is the same in every step
            apply_grammar(self)
            step = step._replace(logits=step.processed(self))
            sampling = self.of_processed()
        call: dict[str, Any] = {
            "target_logits": step.logits,
            "draft_token_ids": input_ids,  # unused: each row is its request's last
            "row_starts": starts,
            "num_draft_tokens": 0,
            "slots": expanded_idx_mapping,
            "seeds": self.slot_values().seeds,
            "row_positions": pos,
        }
        if step.logits.dtype not in self.compiled_dtypes:
            self.compiled_dtypes.add(step.logits.dtype)
            self.compile_kernels(self.verifier, lambda sampling: call | sampling, step)
        token_ids = self.verifier.packed(**call, **sampling).token_ids[:, 0]
        if return_logprobs:  # vLLM computes them from these logits, so grammar masks must be in them
            apply_grammar(self)
        return token_ids, step.logits


def why_not_by_kernels(verifier: RejectionSampler, call: dict[str, Any]) -> str | None:
    """Return the reason why kernels cannot verify a call, or None. The eager backend would be slower than vLLM."""
    logits = call["target_logits"]
    backend = backends.choose(verifier.backend, logits)
    if backend is not eager:
        why_not: str | None = backend.why_not_verified(verifier.method, check_verification(**call))
        return why_not
    return None if logits.is_cpu else backends.obstacle(logits.device)  # on a CPU, the eager backend is the only one


def few_with_processors(step: StepInputs, needs: np.ndarray, starts: np.ndarray | None) -> Requests | None:
    """Return the requests of a step that need vLLM's copy of logits; None if no request does, or more than `MOST_SPLIT`.

    Args:
        step: the step.
        needs: [batch] the needs of each request, in bits.
        starts: [batch + 1] the first row of each request and the end of the last. If it is None or not of these rows, only
            the device knows them, and the result is None.
    """
    if starts is None or len(starts) != len(needs) + 1 or starts[-1] != len(step.logits):
        return None
    selected = (needs & PROCESSORS) > 0
    if not 0 < selected.sum() <= len(selected) * MOST_SPLIT:
        return None
    return Requests.of(selected, starts, step.logits.device)
