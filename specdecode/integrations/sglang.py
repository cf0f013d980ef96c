"""Verification in SGLang: a hook around `eagle_sample`, which returns the tokens of a verify step.

All requests have the same number of rows, so the sampler's arguments are views of SGLang's tensors:

| SGLang | the sampler |
|---|---|
| `next_token_logits` [batch * D, vocab] | `target_logits` [batch, D, vocab] |
| `draft_token` [batch * D], column 0 is the last token | `draft_token_ids`: the other columns |
| `seq_lens`, the position of the last token | `positions`: one more |
| `top_ks` 1 is greedy | `temperature` 0 |
| `draft_probs` q, of rejection sampling | `draft_logits`: T log q, whose softmax at temperature T is q |
| no rejection sampling, or all requests are greedy | `draft_logits=None`, a point mass |

T log q is the only copy of vocabulary size. It costs 8 bytes per probability, read and written once by one kernel. Its
logsumexp is 0, so that verification reads the copy only where a draft was rejected. `"strict"` needs no draft logits, and
a step with only greedy requests has none, because SGLang then computes no q.

Trees of drafts (EAGLE with a top-k above 1, n-gram look-up) are verified by `RejectionSampler("strict").tree`, for every
method of chains: tree drafts come without q, and the walk is exact for every tree.

| SGLang | `tree` |
|---|---|
| `draft_token` [batch * D], column 0 is the last token | `token_ids` [batch, D] |
| `retrieve_next_token`, `retrieve_next_sibling` [batch, D] | `parents`, by `from_links` |
| `max_tree_depth`, which counts node 0 | `max_depth`: one less |
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from specdecode import RejectionSampler, SamplerOutput, Sampling, TreeOutput, backends, eager
from specdecode.arguments import check_tree, draw_seeds
from specdecode.integrations.engine import (
    EngineMethod,
    Fallbacks,
    first_integers,
    switched_on,
    unknown_reason,
    verify,
    warm_up,
    zeros,
)
from specdecode.trees import from_links, place

__all__ = ["EagleSample", "Engine", "install"]

TARGET = "sglang.srt.speculative.eagle_utils.eagle_sample"

logger = logging.getLogger("specdecode")


def install(method: EngineMethod) -> None:
    """Register the hook; SGLang applies it when it has loaded its plug-ins.

    `SPECDECODE_SGLANG` calls this in every process of SGLang.

    Args:
        method: `"probabilistic"`, `"block"` or `"strict"`.

    Raises:
        ImportError: SGLang is not installed, or has no hooks.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # AROUND and not REPLACE: the hook receives SGLang's function, and calls it for the steps that it leaves to SGLang.
    HookRegistry.register(TARGET, EagleSample(method, Engine()), HookType.AROUND)


class Engine:
    """The state of SGLang that the hook reads."""

    def settings(self) -> Any:
        """Return the server's speculative settings."""
        from sglang.srt.runtime_context import get_spec

        return get_spec()

    def simulates_acceptance(self) -> bool:
        """Return whether SGLang will replace the accepted counts (`SGLANG_SIMULATE_ACC_LEN`)."""
        from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

        return bool(SIMULATE_ACC_LEN > 0)

    def sanitize_nan_logits(self, logits: Tensor) -> None:
        """Run SGLang's checks for NaN logits, as it is configured to."""
        from sglang.srt.utils.async_probe import sanitize_nan_logits

        sanitize_nan_logits(logits, "verify: target model logits")

    def ranks(self) -> Any:
        """Return the group of ranks that must emit the same tokens."""
        from sglang.srt.layers.dp_attention import is_dp_attention_enabled
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().attn_tp_group if is_dp_attention_enabled() else get_parallel().tp_group


class RequestState(NamedTuple):
    """Sampling parameters of a batch's requests."""

    given: tuple[Tensor | None, ...]
    """SGLang's source tensors. SGLang makes new ones when requests come or go, and never changes them."""
    temperature: Tensor  # [batch] float32, 0 for greedy requests
    seeds: Tensor  # [batch] int64: SGLang's, otherwise random; the noise differs by position
    is_truncated: bool


class StepInputs(NamedTuple):
    """The arguments of SGLang's `eagle_sample`."""

    verify_input: Any  # the drafts
    batch: Any  # the requests
    logits_output: Any  # the target's logits
    grammar_mask: Any  # is applied to the logits
    uno_target_max_top_k: int | None  # of SGLang's Uno trees
    watermark_state: Any
    unknown: dict[str, Any]  # arguments of a later SGLang

    @property
    def info(self) -> Any:
        """SGLang's sampling parameters."""
        return self.batch.sampling_info

    @property
    def logits(self) -> Tensor:
        """The target's logits, [batch * num_rows, vocab]."""
        logits: Tensor = self.logits_output.next_token_logits
        return logits

    @property
    def is_tree(self) -> bool:
        """Whether drafts are linked as a tree. Otherwise they are a chain."""
        drafts = self.verify_input
        return bool(drafts.tree_topk != 1 or drafts.draft_token_num != drafts.max_tree_depth)

    @property
    def has_draft_probs(self) -> bool:
        """Whether drafts come with the probabilities that they were drawn from, over the target's vocabulary."""
        draft_probs = self.verify_input.draft_probs
        return draft_probs is not None and draft_probs.shape[-1] == self.logits.shape[-1]

    @property
    def is_truncated(self) -> bool:
        """Whether any request truncates; the top_k of 1 of greedy requests in SGLang does not count."""
        info, vocab = self.info, self.logits.shape[-1]
        if info.is_all_greedy:
            return False
        top_k = info.need_top_k_sampling and any(1 < each.sampling_params.top_k < vocab for each in self.batch.reqs)
        return bool(top_k or info.need_top_p_sampling or info.need_min_p_sampling)


class EagleSample:
    """The hook: verify a chain or a tree of drafts per request with this package, and leave other steps to SGLang.

    Args:
        method: `"probabilistic"`, `"block"` or `"strict"`, for chains.
        engine: the state of SGLang.
    """

    def __init__(self, method: EngineMethod, engine: Engine) -> None:
        self.verifier = RejectionSampler(method)
        self.tree_verifier = RejectionSampler("strict")
        self.engine = engine
        self.fallbacks = Fallbacks(logger)
        self.warm: set[torch.dtype] = set()
        self.warm_trees: set[torch.dtype] = set()
        self.requests: RequestState | None = None
        """The state of the last step, reused until requests come or go; never reused with pipeline parallelism."""
        self.checked: set[Hashable] = set()

    def __call__(
        self,
        original: Any,
        verify_input: Any,
        batch: Any,
        logits_output: Any,
        grammar_mask: Any = None,
        uno_target_max_top_k: int | None = None,
        *,
        watermark_state: Any = None,
        watermark_full_mask: bool = True,
        **unknown: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Verify one step, with the arguments and results of SGLang's `eagle_sample`, given as `original`.

        Returns:
            [batch * D] int32, the token that each row emits, 0 for rows without a token; [batch] int32, the number of
            emitted tokens of each request; [batch, max_tree_depth] int32, the rows that emit, in the order of the tokens,
            then -1.
        """
        given = verify_input, batch, logits_output, grammar_mask, uno_target_max_top_k
        step, is_idle = StepInputs(*given, watermark_state, unknown), batch.forward_mode.is_idle()
        reason = None if is_idle else self.why_not(step)
        if reason is not None:
            self.fallbacks.add(reason, "SGLang verifies such a step, by its own rule")
        if is_idle or reason is not None:
            watermarks = {"watermark_state": watermark_state, "watermark_full_mask": watermark_full_mask}
            results: tuple[Tensor, Tensor, Tensor] = original(*given, **watermarks, **unknown)
            return results
        self.engine.sanitize_nan_logits(step.logits)
        penalize(step)
        if grammar_mask is not None:
            grammar_mask.apply(step.logits)
        if step.is_tree:
            output = self.tree_verifier.tree(**self.as_tree_call(step))
            results = as_tree_result(output, step.verify_input.draft_token_num)
        else:
            call = self.as_call(step)
            kind = *call, call["target_logits"].dtype, call["seeds"].dtype
            results = as_result(verify(self.verifier, call, kind, self.checked))
        if not step.info.is_all_greedy or torch.version.hip:  # SGLang allows ranks to have different drafts
            ranks = self.engine.ranks()
            if ranks.world_size > 1:  # each rank draws the seeds that SGLang does not give
                for result in results:
                    ranks.broadcast(result, src=0)
        return results

    def draws_drafts(self) -> bool:
        """Return whether SGLang draws drafts from probabilities that the method needs."""
        return self.verifier.method != "strict" and bool(self.engine.settings().speculative_use_rejection_sampling)

    def why_not(self, step: StepInputs) -> str | None:
        """Return the reason to leave a step to SGLang, or None."""
        settings = self.engine.settings()
        if reason := unknown_reason("arguments that", switched_on(step.unknown)):
            return reason
        if step.uno_target_max_top_k is not None:
            return "a tree of Uno"
        if step.watermark_state is not None and step.info.has_watermark_candidates:
            return "watermarks"
        if settings.speculative_accept_threshold_single != 1 or settings.speculative_accept_threshold_acc != 1:
            thresholds = "speculative_accept_threshold_single or _acc below 1"
            return f"{thresholds}, which accept drafts that the target would not emit"
        if self.engine.simulates_acceptance():
            return "SGLANG_SIMULATE_ACC_LEN"
        if step.is_tree:
            return None
        if self.draws_drafts() and not step.info.is_all_greedy and not step.has_draft_probs:
            # SGLang's function raises the error.
            return "drawn drafts without probabilities of the target's vocabulary"
        return None

    def as_call(self, step: StepInputs) -> dict[str, Any]:
        """Return the sampler's arguments for a chain of `verify_input.draft_token_num - 1` drafts per request."""
        num_rows, vocab, requests = step.verify_input.draft_token_num, step.logits.shape[-1], self.state_of(step)
        call = {
            "target_logits": step.logits.view(-1, num_rows, vocab),
            "draft_token_ids": step.verify_input.draft_token.view(-1, num_rows)[:, 1:],
            "temperature": requests.temperature,
            "seeds": requests.seeds,
            "positions": step.batch.seq_lens.to(torch.int64) + 1,
        }
        self.warm_up_once(call, step.info)
        if self.draws_drafts() and not step.info.is_all_greedy:
            call |= drawn_from(step.verify_input.draft_probs, requests.temperature)
        if requests.is_truncated:
            call |= truncation(call, step.info)
        return call

    def state_of(self, step: StepInputs) -> RequestState:
        """Return the state of a step's requests, computed once for a batch: each operation delays the step on the host."""
        info = step.info
        given = info.temperatures, info.top_ks, info.sampling_seed
        if self.requests is None or any(old is not new for old, new in zip(self.requests.given, given)):
            temperature = info.temperatures.view(-1) * (info.top_ks > 1)  # greedy in SGLang
            seeds = info.sampling_seed  # None unless SGLang's inference is deterministic
            if seeds is None:
                seeds = draw_seeds(temperature.shape, temperature.device)
            self.requests = RequestState(given, temperature, seeds, step.is_truncated)
        return self.requests

    def warm_up_once(self, call: dict[str, Any], info: Any) -> None:
        """Compile all kernels at the first call: SGLang's own warm-up makes it, with a greedy request.

        `call` has the sampler's arguments without draft logits and truncation; `info` has the truncation.
        """
        dtype = call["target_logits"].dtype
        if dtype in self.warm:
            return
        if not self.warm:  # not in `install`: SGLang loads its plug-ins before it sets up the log
            logger.info("specdecode: %r verifies draft chains", self.verifier.method)
        self.warm.add(dtype)
        first = first_request(call)
        calls, fullest = [first], first
        if self.draws_drafts():
            batch, num_rows, vocab = first["target_logits"].shape
            draft_probs = first["temperature"].new_zeros(batch, num_rows - 1, vocab)
            fullest = first | drawn_from(draft_probs, first["temperature"])
            calls.append(fullest)
        warm_up(self.verifier, [*calls, fullest | first_request(truncation(fullest, info))])

    def as_tree_call(self, step: StepInputs) -> dict[str, Any]:
        """Return the arguments of `RejectionSampler.tree` for `verify_input.draft_token_num` nodes per request."""
        drafts, vocab, requests = step.verify_input, step.logits.shape[-1], self.state_of(step)
        call = {
            "target_logits": step.logits.view(-1, drafts.draft_token_num, vocab),
            "token_ids": drafts.draft_token.view(-1, drafts.draft_token_num),
            "parents": from_links(drafts.retrieve_next_token, drafts.retrieve_next_sibling),
            "max_depth": drafts.max_tree_depth - 1,
            "temperature": requests.temperature,
            "seeds": requests.seeds,
            "positions": step.batch.seq_lens.to(torch.int64) + 1,
        }
        if step.logits.dtype not in self.warm_trees:
            if not self.warm_trees:
                logger.info("specdecode: 'strict' verifies draft trees")
            self.warm_trees.add(step.logits.dtype)
            warm_up_trees(call, step.info)
        return call | truncation(call, step.info) if requests.is_truncated else call


def penalize(step: StepInputs) -> None:
    """Apply penalties and biases to logits in place, as SGLang's function does: equally to all rows of a request.

    The drafts of a step do not count as emitted, because SGLang keeps no counts, only the terms and factors of each
    logit.
    """
    info, rows = step.info, step.logits.view(-1, step.verify_input.draft_token_num, step.logits.shape[-1])
    if info.acc_additive_penalties is not None:
        rows.add_(info.acc_additive_penalties[:, None])
    if info.acc_scaling_penalties is not None:
        factors = info.acc_scaling_penalties[:, None]
        rows.copy_(torch.where(rows < 0, rows * factors, rows / factors))
    if info.logit_bias is not None:
        rows.add_(info.logit_bias[:, None])


def first_request(call: dict[str, Any]) -> dict[str, Any]:
    """Return arguments for the first request alone."""
    return {name: value[:1] if isinstance(value, Tensor) else value for name, value in call.items()}


def truncation(call: dict[str, Any], info: Any) -> dict[str, Any]:
    """Return all truncation arguments, even if only one truncates: each combination would need its own kernels."""
    result = {"top_k": info.top_ks, "top_p": info.top_ps, "min_p": info.min_ps}
    if "draft_logits" in call:  # the drafts were drawn from whole rows
        result["draft_sampling"] = Sampling(temperature=call["temperature"])
    return result


def drawn_from(draft_probs: Tensor, temperature: Tensor) -> dict[str, Tensor]:
    """Return the arguments for drafts drawn from probabilities q: draft logits T log q, and their logsumexp, 0.

    Args:
        draft_probs: [batch, num_draft_tokens, vocab] float32.
        temperature: [batch] float32, 0 for greedy requests, whose draft rows are not needed.
    """
    draft_logits = torch.xlogy(temperature[:, None, None], draft_probs)
    return {"draft_logits": draft_logits, "draft_logsumexp": zeros(draft_probs.shape[:2], draft_probs.device)}


def as_result(output: SamplerOutput) -> tuple[Tensor, Tensor, Tensor]:
    """Return an output as SGLang's `predict`, `accept_lens` and `accept_index`, in few operations."""
    token_ids = output.token_ids
    rows = first_integers(token_ids.numel(), token_ids.device).view_as(token_ids)
    predict, accept_index = (token_ids.new_empty(token_ids.shape, dtype=torch.int32) for _ in range(2))
    torch.maximum(token_ids, rows[0, 0], out=predict)  # a 0 on the device
    torch.bitwise_or(token_ids >> 63, rows, out=accept_index)  # shifted, -1 is -1 and others are 0; -1 | row is -1
    return predict.view(-1), output.num_tokens, accept_index


# ---- Trees -----------------------------------------------------------------------------------------------------------


def warm_up_trees(call: dict[str, Any], info: Any) -> None:
    """Compile the kernels of trees, with truncation and without, for any number of requests.

    `call` has the arguments of `RejectionSampler.tree` without truncation; `info` has the truncation.
    """
    backend = backends.choose("auto", call["target_logits"])
    if backend is eager:
        return
    first = first_request(call)
    batches = [check_tree(**first), check_tree(**first, **first_request(truncation(first, info)))]
    backend.compile_ahead([functools.partial(backend.warm_up_tree, batch) for batch in batches])


def as_tree_result(output: TreeOutput, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return an output as SGLang's `predict`, `accept_lens` and `accept_index`, with each token at the row of its node."""
    path = nn.functional.pad(output.nodes, (1, 0))  # node 0 emits the first token
    first_row = num_nodes * first_integers(len(path), path.device)[:, None]
    accept_index = torch.where(path < 0, -1, first_row + path).to(torch.int32)
    predict = place(path.long(), output.token_ids, num_nodes).clamp(min=0).to(torch.int32)
    return predict.flatten(), output.num_tokens, accept_index
