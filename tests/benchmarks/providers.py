"""The verifiers on a GPU: this package in several ways, straightforward PyTorch, and the installed engines."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdecode import RejectionSampler
from specdecode.batch import SamplerOutput
from specdecode.trees import to_links
from tests.benchmarks.bandwidth import do_nothing
from tests.benchmarks.inputs import Inputs, packed_verification, straightforward, verification


class Verifier(NamedTuple):
    """A method of this package on one of its backends."""

    method: str
    backend: str = "triton"
    with_logsumexp: bool = False
    packed: bool = False
    deterministic: bool = False  # without draft logits

    def __call__(
        self, inputs: Inputs, seed: int = 0, truncation: dict[str, Any] | None = None, **others: Any
    ) -> Callable[[], SamplerOutput]:
        draft = inputs.drafts(self.method, seed, **(truncation or {}))
        options: dict[str, Any] = {"seeds": seed, **(truncation or {}), **others}
        if self.with_logsumexp:
            options |= {"draft_logsumexp": draft.logsumexp, "draft_cutoff": draft.cutoff}
        sampler = RejectionSampler(self.method, backend=self.backend)
        verify = packed_verification if self.packed else verification
        return verify(inputs, sampler, draft, deterministic=self.deterministic, **options)

    def rows_needed(self, num_accepted: Tensor, num_draft_tokens: int) -> int:
        """Count the rows that an outcome depends on.

        These are the target rows through the row that emits. For a ratio the tested draft rows are needed too; if their
        logsumexp is given, one logit of each is enough. Block verification needs the rows of all drafts. Blocks that are
        read again, to draw a token or to search a residual, are not counted.
        """
        last = torch.full_like(num_accepted, num_draft_tokens) if self.method == "block" else num_accepted
        target, tested = last + 1, (last + 1).clamp(max=num_draft_tokens)
        alone = self.method == "strict" or self.with_logsumexp or self.deterministic
        return int((target if alone else target + tested).sum())


def plain(inputs: Inputs, function: Callable[..., Tensor] = straightforward) -> Callable[[], Tensor]:
    token_ids = inputs.drafts("probabilistic").token_ids
    return functools.partial(function, inputs.target_logits, token_ids, inputs.draft_logits, inputs.temperature)


def compiled(inputs: Inputs) -> Callable[[], Tensor]:
    return plain(inputs, torch.compile(straightforward, mode="max-autotune-no-cudagraphs", dynamic=False))


def vllm(inputs: Inputs) -> Callable[[], None]:
    """Verify as vLLM's model runner does: a float32 copy of the target's logits, temperature, rejection sampling."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    token_ids = inputs.drafts("probabilistic").token_ids
    batch, num_draft_tokens = token_ids.shape
    requests = torch.arange(batch, dtype=torch.int32, device="cuda")
    offsets = torch.arange(num_draft_tokens + 1, dtype=torch.int32, device="cuda").repeat(batch)
    starts = (num_draft_tokens + 1) * torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    request_of_row, positions, seeds = requests.repeat_interleave(num_draft_tokens + 1), offsets.long(), requests.long()
    temperature = torch.full((batch,), inputs.temperature, device="cuda")
    drafted = torch.nn.functional.pad(token_ids, (1, 0)).flatten()  # before each request's drafts, its last token

    def call() -> None:
        logits = inputs.target_logits.flatten(0, 1).to(torch.float32, copy=True)
        apply_temperature(logits, request_of_row, temperature)
        rows = (requests, request_of_row, offsets)
        rejection_sample(
            logits, inputs.draft_logits, drafted, starts, positions, *rows, temperature, seeds, num_draft_tokens
        )

    return call


def renormalized(
    probabilities: Tensor, renormalize: dict[str, Callable[..., Tensor]], truncation: dict[str, Any] | None
) -> Tensor:
    """Truncate [batch, rows, vocab] probabilities by an engine's functions, which take one number per row."""
    flat = probabilities.flatten(0, 1)
    for name, dtype in (("top_k", torch.int32), ("top_p", torch.float32)):
        if truncation and name in truncation:
            limits = torch.full((len(flat),), truncation[name], dtype=dtype, device=flat.device)
            flat = renormalize[name](flat, limits)
    return flat.view(probabilities.shape)


def sglang_probabilities(logits: Tensor, temperature: Tensor, truncation: dict[str, Any] | None = None) -> Tensor:
    """Compute SGLang's float32 probabilities of [batch, rows, vocab] logits: softmax, top-k, then top-p."""
    from sglang.kernels.ops.sampling import softmax
    from sglang.kernels.ops.sampling.renorm import top_k_renorm_prob, top_p_renorm_prob

    temperatures = temperature.repeat_interleave(logits.shape[1], dim=0)
    probabilities = softmax(logits.flatten(0, 1).float(), temperatures).view(logits.shape)
    return renormalized(probabilities, {"top_k": top_k_renorm_prob, "top_p": top_p_renorm_prob}, truncation)


class SglangVerification(NamedTuple):
    """One of SGLang's kernels of verification, and the trees that it verifies."""

    kernel: Callable[..., None]
    candidates: Tensor  # [batch, nodes] int64, node 0 is the last token
    rows: Tensor  # [batch, nodes] int64, each node's row
    max_tree_depth: int  # with the last token
    next_token: Tensor | None = None  # None, as next_sibling: a chain, whose kernel reads no links
    next_sibling: Tensor | None = None

    def __call__(self, target_probs: Tensor, draft_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the token emitted after each row, the accepted rows and the numbers of accepted drafts."""
        batch, nodes = self.candidates.shape
        predicts = torch.zeros(batch * nodes, dtype=torch.int32, device="cuda")
        accept_index = torch.full((batch, self.max_tree_depth), -1, dtype=torch.int32, device="cuda")
        accept_token_num = torch.empty(batch, dtype=torch.int32, device="cuda")
        self.kernel(
            predicts=predicts,
            accept_index=accept_index,
            accept_token_num=accept_token_num,
            candidates=self.candidates,
            retrive_index=self.rows,
            retrive_next_token=self.next_token,
            retrive_next_sibling=self.next_sibling,
            uniform_samples=torch.rand(batch, nodes, device="cuda"),
            uniform_samples_for_final_sampling=torch.rand(batch, device="cuda"),
            target_probs=target_probs,
            draft_probs=draft_probs,
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
        )
        return predicts, accept_index, accept_token_num


def sglang(inputs: Inputs, truncation: dict[str, Any] | None = None) -> Callable[[], Tensor]:
    """Verify as SGLang does with draft probabilities: float32 logits, softmax of both, verification of a chain.

    Top-k and then top-p truncate only the target's probabilities.
    """
    from sglang.kernels.ops.speculative.verify_sampling import chain_speculative_sampling_triton

    token_ids = inputs.drafts("probabilistic").token_ids
    candidates = torch.nn.functional.pad(token_ids, (1, 0))  # before each request's drafts, its last token
    rows = torch.arange(candidates.numel(), device="cuda").view(candidates.shape)
    temperature = torch.full((len(candidates), 1), inputs.temperature, device="cuda")
    verify = SglangVerification(chain_speculative_sampling_triton, candidates, rows, candidates.shape[1])

    def call() -> Tensor:
        target_probs = sglang_probabilities(inputs.target_logits, temperature, truncation)
        return verify(target_probs, sglang_probabilities(inputs.draft_logits, temperature))[0]

    return call


def sglang_tree(
    target_logits: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    depth: int,
    temperature: float,
    truncation: dict[str, Any] | None = None,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """Compute what SGLang does with a tree: float32 logits, softmax of all rows, its target-only rule at thresholds of 1."""
    from sglang.kernels.ops.speculative.verify_sampling import tree_speculative_sampling_target_only

    rows = torch.arange(token_ids.numel(), device="cuda").view(token_ids.shape)
    links = (each.expand_as(token_ids).contiguous() for each in to_links(parents))
    temperatures = torch.full((len(token_ids), 1), temperature, device="cuda")
    verify = SglangVerification(tree_speculative_sampling_target_only, token_ids, rows, depth + 1, *links)

    def call() -> tuple[Tensor, Tensor, Tensor]:
        target_probs = sglang_probabilities(target_logits, temperatures, truncation)
        return verify(target_probs, torch.zeros_like(target_probs))  # the kernel notes rejected siblings in the zeros

    return call


def flashinfer(inputs: Inputs, truncation: dict[str, Any] | None = None) -> Callable[[], Tensor]:
    """Compute FlashInfer's softmax of both, which makes them float32, and its verification of a chain.

    Top-k and then top-p truncate only the target's probabilities, as in SGLang.
    """
    from flashinfer.sampling import chain_speculative_sampling, softmax, top_k_renorm_probs, top_p_renorm_probs

    token_ids = inputs.drafts("probabilistic").token_ids.to(torch.int32)
    renormalize = {"top_k": top_k_renorm_probs, "top_p": top_p_renorm_probs}

    def probabilities(logits: Tensor) -> Tensor:
        return softmax(logits.flatten(0, 1), inputs.temperature).view(logits.shape)

    def call() -> Tensor:
        target_probs, draft_probs = probabilities(inputs.target_logits), probabilities(inputs.draft_logits)
        target_probs = renormalized(target_probs, renormalize, truncation)
        return chain_speculative_sampling(draft_probs, token_ids, target_probs, seed=0, offset=0)[0]

    return call


PROVIDERS: dict[str, Callable[[Inputs], Callable[[], Any]]] = {
    "triton": Verifier("probabilistic"),
    "triton with draft_logsumexp": Verifier("probabilistic", with_logsumexp=True),
    "triton block": Verifier("block"),
    "triton block with draft_logsumexp": Verifier("block", with_logsumexp=True),
    "triton strict": Verifier("strict"),
    "triton one-hot": Verifier("probabilistic", deterministic=True),
    "triton greedy": Verifier("strict"),
    "triton packed": Verifier("probabilistic", packed=True),
    "eager": Verifier("probabilistic", "eager"),
    "straightforward": plain,
    "straightforward compiled": compiled,
    "vllm": vllm,
    "sglang": sglang,
    "flashinfer": flashinfer,
    "nothing": lambda inputs: do_nothing(launches=2),
}
FAST = ["triton", "triton with draft_logsumexp", "triton block", "triton block with draft_logsumexp", "triton strict"]
FAST.append("triton one-hot")
SLOW = ["eager", "straightforward", "vllm", "sglang", "flashinfer"]
