"""What requests ask for, as vLLM's sampling states have it, and the tokens of steps without drafts."""

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdecode import Adjustments, RejectionSampler, Sampling, backends, eager
from specdecode.batch import VerificationBatch
from specdecode.integrations.vllm.adjusting import Known, known_processors
from specdecode.integrations.vllm.reporting import logger
from specdecode.packing import Packing
from specdecode.report import MOST_KEPT, MOST_TOP_LOGPROBS
from specdecode.sampling import Truncation

PROCESSORS, TRUNCATES, LOGPROBS, ADJUSTS, UNLISTED, WIDE = 1, 2, 4, 8, 16, 32
"""What a request may need, in bits: vLLM's logits processors, truncation, log-probabilities, penalties or biases.

And what calls do not list: log-probabilities of greedy requests, for which vLLM takes the row's softmax, or of more than 20
tokens beside the sampled one; kept sets that may be of more than 1,024 tokens.
"""

LISTED_MODE = "processed_logprobs"
"""The `logprobs_mode` whose log-probabilities calls list."""

NO_SAMPLING_NEED = SimpleNamespace(add_request=lambda request, params: False)
"""In place of vLLM's sampling states: temperature and truncation need no processing."""


class SlotValues(NamedTuple):
    """What requests sample by, [num_slots] each.

    vLLM's own tensors are views of the host's memory: each program of a kernel would read them over the bus.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor


def views_of(states: Any) -> SlotValues:
    """Return vLLM's own tensors."""
    return SlotValues(*[getattr(states, name).gpu for name in SlotValues._fields])


def values_of(sampler: Any) -> SlotValues:
    """Return what requests sample by, as a sampler has it."""
    return sampler.slot_values() if isinstance(sampler, TokenSampling) else views_of(sampler.sampling_states)


class TokenSampling:
    """Mixed into vLLM's `Sampler`: it knows what each request needs, and draws by seed for `"strict"`.

    vLLM's sampler draws the tokens of steps in which no request has a draft. For `"strict"` they must have the noise of all
    other tokens: a request's text depends on its seed and not on which steps had drafts.
    """

    verifier: ClassVar[RejectionSampler]
    unknown: ClassVar[str | None] = None
    """Why all steps are left to vLLM: it may do what is not known here."""

    copies: SlotValues | None = None
    added: Adjustments | None = None

    # What vLLM's class has:
    apply_sampling_params: Callable[..., Tensor]
    logits_processors: list[Any]
    logprobs_mode: str
    needs_logits_processing: np.ndarray
    return_sampling_mask: bool
    sampling_states: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.other_processing = np.zeros_like(self.needs_logits_processing)
        self.adjusting = np.zeros_like(self.needs_logits_processing)
        self.needs = np.zeros(len(self.needs_logits_processing), dtype=np.uint8)
        config = kwargs.get("vllm_config", args[0] if args else None)
        self.shards_batches = bool(
            getattr(getattr(config, "parallel_config", None), "enable_batch_sharded_sampling", False)
        )

    @functools.cached_property
    def kinds(self) -> set[torch.dtype]:
        """Of logits whose kernels are compiled."""
        return set()

    @functools.cached_property
    def known(self) -> Known | None:
        """The states of penalties and biases that vLLM has, if they are applied here."""
        return known_processors(self)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Note what a request needs: vLLM's logits processors, penalties or biases, truncation, log-probabilities."""
        # vLLM keeps one flag for all: so first let its method see no need of temperature, truncation, penalties and biases.
        known, states = self.known, self.sampling_states
        processors = getattr(self, "logits_processors", [])
        self.sampling_states = NO_SAMPLING_NEED
        self.logits_processors = [each for each in processors if all(each is not one for one in known or ())]
        try:
            super().add_request(req_idx, sampling_params)  # type: ignore[misc]
        finally:
            self.sampling_states, self.logits_processors = states, processors
        adjusts, others = (False, False) if known is None else known.add_request(req_idx, sampling_params)
        self.other_processing[req_idx] = self.needs_logits_processing[req_idx] | others
        self.adjusting[req_idx] = adjusts
        needs_others = self.other_processing[req_idx] | adjusts
        self.needs_logits_processing[req_idx] = needs_others | states.add_request(req_idx, sampling_params)
        self.needs[req_idx] = needs_of(self, np.array([req_idx]))[0]
        self.copies = self.added = None

    def slot_values(self) -> SlotValues:
        """Return what requests sample by, in memory of the device; copied again only after a request has come."""
        if self.copies is None:
            self.copies = SlotValues(*[values.clone() for values in views_of(self.sampling_states)])
        return self.copies

    def adjustments(self) -> Adjustments:
        """Return the penalties and biases of requests; copied again only after a request has come."""
        assert self.known is not None
        if self.added is None:
            self.added = self.known.adjustments()
        return self.added

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
        mappings = expanded_idx_mapping, idx_mapping, idx_mapping_np
        tokens = pos, input_ids, expanded_local_pos, seq_lens_upper_bound_np
        if self.verifier.method != "strict" or self.unknown is not None:
            return super().sample(logits, *mappings, *tokens, return_logprobs)  # type: ignore[misc, no-any-return]
        needs, values = needs_in(self, idx_mapping_np), self.slot_values()
        if why_processed(self, needs & ~LOGPROBS | LOGPROBS * return_logprobs) is None:
            sampling = requested(values, needs) | adjusted(self, needs)
        else:
            logits = self.apply_sampling_params(logits, *mappings, *tokens)
            sampling = of_processed(values)
        call: dict[str, Any] = {
            "target_logits": logits,
            "draft_token_ids": input_ids,  # not looked at: each row is its request's last
            "row_starts": torch.arange(len(logits) + 1, device=logits.device),
            "num_draft_tokens": 0,
            "slots": expanded_idx_mapping,
            "seeds": values.seeds,
            "row_positions": pos,
        }
        if logits.dtype not in self.kinds:
            self.kinds.add(logits.dtype)
            compile_all(self.verifier, call, self)
        return self.verifier.packed(**call, **sampling).token_ids[:, 0], logits


def needs_of(sampler: Any, requests: np.ndarray) -> np.ndarray:
    """Return what each request needs, [requests] in bits.

    Greedy requests need no truncation.
    """
    states = sampler.sampling_states
    # A sampler that is not ours does not tell processors from temperatures: then both count.
    processors = getattr(sampler, "other_processing", sampler.needs_logits_processing)[requests]
    truncates = (states.top_k.np[requests] != states.vocab_size) | (states.top_p.np[requests] != 1)
    truncates = (truncates | (states.min_p.np[requests] != 0)) & (states.temperature.np[requests] != 0)
    logprobs = states.num_logprobs[requests] >= 0
    unlisted = logprobs & (states.temperature.np[requests] == 0) | (states.num_logprobs[requests] > MOST_TOP_LOGPROBS)
    bits: np.ndarray = PROCESSORS * processors | TRUNCATES * truncates | LOGPROBS * logprobs | UNLISTED * unlisted
    bits = bits | WIDE * (states.top_k.np[requests] > MOST_KEPT)
    if hasattr(sampler, "adjusting"):
        bits = bits | ADJUSTS * sampler.adjusting[requests]
    return bits.astype(np.uint8)


def needs_each(sampler: Any, requests: np.ndarray) -> np.ndarray:
    """Return what each of the requests of a step needs, in bits, as it was noted when it came."""
    needs: np.ndarray | None = getattr(sampler, "needs", None)
    return needs_of(sampler, requests) if needs is None else needs[requests]


def needs_in(sampler: Any, requests: np.ndarray) -> int:
    """Return what any of the requests of a step needs, in bits."""
    return int(np.bitwise_or.reduce(needs_each(sampler, requests), initial=0))


def processes_logprobs(sampler: Any) -> bool:
    """Return whether log-probabilities, if asked for, are of logits that vLLM has processed."""
    return sampler.logprobs_mode in ("processed_logits", "processed_logprobs")


def why_processed(sampler: Any, needs: int, lists: bool = False) -> str | None:
    """Return why a step that needs so much needs logits that vLLM has processed, or None.

    If what vLLM returns of rows may be listed by calls, fewer do.
    """
    if needs & PROCESSORS:
        return "logits processors (allowed tokens, minimum lengths, bad words, thinking budgets, custom ones)"
    if needs & LOGPROBS and processes_logprobs(sampler):
        is_listed = lists and sampler.logprobs_mode == LISTED_MODE and not needs & (UNLISTED | ADJUSTS)
        if not is_listed:
            return f"logprobs_mode {sampler.logprobs_mode!r}"
    if sampler.return_sampling_mask and not (lists and not needs & WIDE):
        return "return_sampling_mask"
    return None


def listings(sampler: Any) -> list[dict[str, Any]]:
    """Return what calls may be asked to list."""
    kept = [{"kept_sets": True}] if sampler.return_sampling_mask else []
    if sampler.logprobs_mode != LISTED_MODE:
        return kept
    logprobs: list[dict[str, Any]] = [{"logprobs": "processed", "top_logprobs": count} for count in (0, 1)]
    return [*logprobs, *kept, *[one | more for one in logprobs for more in kept]]


def requested(values: SlotValues, needs: int) -> dict[str, Any]:
    """Return how requests sample from raw logits, by slot, with no truncation if none of them truncates: that costs more."""
    return truncated(values) if needs & TRUNCATES else {"temperature": values.temperature}


def adjusted(sampler: Any, needs: int) -> dict[str, Any]:
    """Return the penalties and biases of requests, if any of them has any."""
    return {"adjustments": sampler.adjustments()} if needs & ADJUSTS else {}


def truncated(values: SlotValues) -> dict[str, Any]:
    """Return how requests sample. All truncation is passed if any is: each selection would need kernels of its own."""
    return {name: getattr(values, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def of_processed(values: SlotValues) -> dict[str, Any]:
    """Return how requests sample from logits that vLLM has divided by the temperature and truncated."""
    return {"temperature": (values.temperature != 0).to(torch.float32)}


def for_drafts(sampling: dict[str, Any], draft_logits: Tensor | None) -> dict[str, Any]:
    """Add how vLLM drew the drafts, where that differs: at the target's temperature, from whole rows."""
    if draft_logits is None or "top_p" not in sampling:
        return sampling
    return sampling | {"draft_sampling": Sampling(temperature=sampling["temperature"])}


def with_masked_drafts(drafts: Tensor, drawn: Tensor, logits: Tensor) -> Tensor:
    """Return drafts, of which vLLM made some -1, with the id that was drawn wherever a grammar has masked it.

    A draft that is left out because of what it is must be rejected as itself, so that the token is drawn from the residual.
    It is sure to be: p(x) = 0. Other drafts that vLLM leaves out, as after the first that is masked, remain -1.

    Args:
        drafts: [num_rows - 1] what each row but the last is to judge, -1 where vLLM leaves a draft out.
        drawn: [num_rows - 1] the ids that were drawn there.
        logits: [num_rows, vocab] with the grammar's masks applied.
    """
    ids = drawn.long().clamp(0, logits.shape[1] - 1)
    is_masked = logits[:-1].gather(1, ids[:, None]).squeeze(1) == -torch.inf
    return torch.where(is_masked, drawn, drafts)


def batch_of(call: dict[str, Any], sampling: dict[str, Any]) -> VerificationBatch:
    """Return what `packed` passes to a backend once it has checked these arguments."""
    temperature, draft_logits = sampling["temperature"], call["draft_logits"]
    limits = [sampling.get(name) for name in ("top_k", "top_p", "min_p")]
    starts, most, slots = call["row_starts"], call["num_draft_tokens"], call["slots"]
    return VerificationBatch(
        target_logits=call["target_logits"],
        draft_token_ids=call["draft_token_ids"],
        draft_logits=draft_logits,
        draft_logsumexp=None,
        temperature=temperature,
        seeds=call["seeds"],
        positions=None,
        truncation=Truncation(*limits) if "top_p" in sampling else None,
        draft_temperature=temperature if "draft_sampling" in sampling else None,
        packing=Packing(starts, most, slots, temperature.shape[0], False, call["row_positions"]),
        draft_vocab_ids=call.get("draft_vocab_ids"),
        adjustments=sampling.get("adjustments"),
        logprobs=sampling.get("logprobs"),
        top_logprobs=sampling.get("top_logprobs", 0),
        kept_sets=sampling.get("kept_sets", False),
    )


def compile_all(
    verifier: RejectionSampler,
    call: dict[str, Any],
    sampler: Any,
    of_rank: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> tuple[str | None, str | None]:
    """Compile the kernels of steps like a call: truncated or not, with penalties and biases or not, with what they may list.

    Args:
        verifier: compiles.
        call: the arguments of its `packed`, but how requests sample.
        sampler: has that.
        of_rank: what of the penalties and biases of requests, as `adjusted` returns them, the verifier takes.

    Returns:
        Why the kernels do not take steps that are not truncated, and those that are; None where they do.
    """
    start = time.monotonic()
    one = {**call, "row_starts": call["row_starts"][:2], "slots": call["slots"][:1]}
    values = values_of(sampler)
    samplings = {"temperature": values.temperature}, for_drafts(truncated(values), call.get("draft_logits"))
    others: list[dict[str, Any]] = [{}]
    if verifier.shard is None and call["num_draft_tokens"] > 0:
        others += listings(sampler)
    if getattr(sampler, "known", None) is not None:
        others.append(of_rank(adjusted(sampler, ADJUSTS)))
    why_not = [why_not_by_kernels(verifier, {**one, **sampling}) for sampling in samplings]
    kinds = [{**sampling, **more} for sampling, reason in zip(samplings, why_not) if reason is None for more in others]
    if verifier.shard is not None:  # whose kernels do not take both
        kinds = [kind for kind in kinds if not {"top_p", "adjustments"} <= kind.keys()]
    warmups = [functools.partial(verifier.warmup, **one, **kind) for kind in kinds]
    if warmups and call["target_logits"].is_cuda and verifier.shard is None:
        backends.kernels().at_once(warmups)
    else:
        for warm_up in warmups:
            warm_up()
    which = f"up to {call['num_draft_tokens']} drafts a request" if call["num_draft_tokens"] > 0 else "no drafts"
    logger.info("specdecode: kernels for %s are compiled, in %.0f s", which, time.monotonic() - start)
    return why_not[0], why_not[1]


def why_not_by_kernels(verifier: RejectionSampler, call: dict[str, Any]) -> str | None:
    """Return why the eager backend would verify a call, or None: it takes more time and memory than vLLM's own method."""
    logits = call["target_logits"]
    backend = backends.choose(verifier.backend, logits)
    if backend is not eager:
        batch = VerificationBatch.check(
            **{"draft_logits": None, "draft_logsumexp": None, "positions": None, "shard": verifier.shard, **call}
        )
        why_not: str | None = backend.why_not_verified(verifier.method, batch)
        return why_not
    return None if logits.is_cpu else backends.obstacle(logits.device)
