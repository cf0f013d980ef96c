"""The public face: check the arguments, hand the bundle to a backend, return what it decided."""

from typing import Literal, get_args

from torch import Tensor

from specdecode import backends, eager
from specdecode.backends import Backend
from specdecode.batch import MOST_DRAFT_TOKENS, RowBatch, SamplerOutput, VerificationBatch, check_choice, check_count
from specdecode.drafting import DraftOutput
from specdecode.noise import SELECT, draft_domains
from specdecode.synthetic import AcceptanceSchedule

Method = Literal["strict", "probabilistic", "block", "synthetic"]


class RejectionSampler:
    """Verify drafted tokens against the target model's logits.

    | method | accepts draft x at a position | on rejection emits |
    |---|---|---|
    | `"strict"` | iff x is the target's own seeded sample y | y |
    | `"probabilistic"` | with probability min(1, p(x) / q(x)) | a draw from max(0, p - q), normalised |
    | `"block"` | jointly with those before it, at least as many in the mean | a draw from max(0, c p - q), normalised |
    | `"synthetic"` | at the scheduled rate, whatever the logits say | what the method it imitates would |

    p is softmax(target_logits / temperature) and q is softmax(draft_logits / temperature). After the last draft stood, a
    bonus token is drawn from p. Requests of temperature 0 are greedy: a draft stands iff it is the argmax of the raw
    target logits (`"synthetic"` keeps to its schedule and emits the argmax).

    The output of `"strict"` and, for drafts from [`draft`][specdecode.RejectionSampler.draft] or of any generator that
    shares no noise with it, of `"probabilistic"` and `"block"` is distributed exactly as if the target had sampled alone;
    that of `"strict"` is, token for token, what [`sample`][specdecode.sample] returns without any drafts.

    `"block"` judges the drafts of a request together: i drafts or more stand with probability c, the running ratio after
    them. It is 1 before the first draft, and each draft x makes it min(1, c p(x) / q(x)). No exact method that sees one
    draft path accepts more in the mean; without draft logits it accepts as `"probabilistic"` does.

    `"synthetic"` is for load tests: it costs what `"probabilistic"` does with the same arguments (what `"strict"` does
    without draft logits) and only the verdict is scheduled.

    Args:
        method: `"strict"`, `"probabilistic"`, `"block"` or `"synthetic"`.
        backend: `"triton"` are kernels for NVIDIA GPUs, computing in float32; `"eager"` is batched PyTorch for any device;
            `"auto"` takes Triton for logits on a GPU, and eager elsewhere.
        schedule: how often `"synthetic"` accepts, and for it alone.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown method or backend, or a schedule missing or out of place.

    Example:
        >>> import torch
        >>> from specdecode import RejectionSampler
        >>> sampler = RejectionSampler("probabilistic")
        >>> target_logits = torch.randn(2, 4, 100, generator=torch.Generator().manual_seed(0))
        >>> draft_logits = target_logits[:, :3] + 0.1
        >>> draft_token_ids = draft_logits.argmax(dim=-1)
        >>> output = sampler(target_logits, draft_token_ids, draft_logits, temperature=0.7, seeds=1)
        >>> output.num_accepted  # the draft's distribution is the target's: all stand
        tensor([3, 3], dtype=torch.int32)

    References:
        Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318, algorithm 2
        (`"probabilistic"`). Sun et al. 2024, arXiv 2403.10444, algorithm 2 (`"block"`). Daliri et al. 2024, arXiv
        2408.07978, algorithm 2 (`"strict"`).
    """

    def __init__(
        self, method: Method, *, backend: Backend = "auto", schedule: AcceptanceSchedule | None = None
    ) -> None:
        check_choice("method", method, get_args(Method))
        check_choice("backend", backend, get_args(Backend))
        if schedule is not None and not isinstance(schedule, AcceptanceSchedule):
            raise TypeError(f"schedule: expected an AcceptanceSchedule, got {type(schedule).__name__}")
        if method == "synthetic" and schedule is None:
            raise ValueError("schedule: method 'synthetic' needs one, such as AcceptanceSchedule.from_mean_rate(...)")
        if method != "synthetic" and schedule is not None:
            raise ValueError(f"schedule: only method 'synthetic' takes one, got one for {method!r}")
        self.method = method
        self.backend = backend
        self.schedule = schedule

    def __repr__(self) -> str:
        """Show how the sampler was made."""
        schedule = "" if self.schedule is None else f", schedule={self.schedule!r}"
        return f"RejectionSampler({self.method!r}, backend={self.backend!r}{schedule})"

    def __call__(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        seeds: int | Tensor | None = None,
        positions: Tensor | None = None,
        draft_logsumexp: Tensor | None = None,
    ) -> SamplerOutput:
        """Verify one step of drafts.

        A request's result depends on its own logits, drafts, temperature, seed and positions alone: not on the batch,
        its slot or the padding.

        Args:
            target_logits: [batch, num_draft_tokens + 1, vocab] raw logits, float16, bfloat16, float32 or float64. Row i
                is the target's distribution of the token at draft i, the last row that of the bonus token. Any strides will
                do; the kernels are fastest where they and the vocabulary are multiples of 16. NaN counts as -inf; a row that
                holds +inf is the point mass on its first.
            draft_token_ids: [batch, num_draft_tokens] int32 or int64. -1 ends a request's drafts: it and what follows
                are ignored, and the row at that place gives the bonus token.
            draft_logits: [batch, num_draft_tokens, vocab] raw logits that the drafts were drawn from, scaled by the same
                temperature. None means a deterministic drafter (n-gram look-up, greedy). `"strict"` has no use for them.
            temperature: one number >= 0 or a [batch] float tensor; 0 is greedy.
            seeds: [batch] int64; an int s means s, s + 1, ...; None draws them from torch's default generator.
            positions: [batch] int64, the absolute position in its sequence of each request's first draft token; None
                means 0. A request that keeps its seed over several steps must pass them, or noise repeats.
            draft_logsumexp: [batch, num_draft_tokens] float32 from [`draft`][specdecode.RejectionSampler.draft], which
                saves reading the draft rows again (but for the eager backend on a GPU, which reads them).

        Returns:
            Accepted drafts and the one token after them, with counts.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value, or `backend="triton"` where that cannot run. On a
                CUDA device values are not looked at: an id outside the vocabulary counts as -1, a temperature that is NaN
                or negative as 0.
        """
        batch = self._check(
            target_logits, draft_token_ids, draft_logits, draft_logsumexp, temperature, seeds, positions
        )
        output: SamplerOutput = backends.choose(self.backend, target_logits).verify(self.method, batch, self.schedule)
        return output

    def warmup(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        seeds: int | Tensor | None = None,
        positions: Tensor | None = None,
        draft_logsumexp: Tensor | None = None,
    ) -> None:
        """Compile what calls with arguments like these need, so that no call has to, whatever its sizes.

        Arguments are alike if they have the same dtypes and are a tensor, a number or None as these are. Sizes do not
        matter, with two exceptions. Rows whose vocabulary, strides or start are no multiples of 16 logits are read in
        another way, which is markedly slower too. And more than 31 drafts or 262,144 tokens need larger kernels. Compiled
        kernels are kept on disk too, in Triton's cache. For the eager backend there is nothing to do. The first call of
        each combination of sizes still takes somewhat longer: its launches are planned then.

        Args:
            target_logits: as for a call; one request is enough.
            draft_token_ids: likewise, as all that follow. Without a draft only what steps without drafts need is compiled.
            draft_logits: where given, what [`draft`][specdecode.RejectionSampler.draft] needs is compiled too.
            temperature: see above.
            seeds: see above.
            positions: see above.
            draft_logsumexp: see above.

        Raises:
            TypeError: as for a call.
            ValueError: as for a call.

        Example:
            >>> import torch
            >>> from specdecode import RejectionSampler
            >>> sampler = RejectionSampler("strict")
            >>> sampler.warmup(torch.zeros(1, 4, 1000), torch.zeros(1, 3, dtype=torch.int64), seeds=0)
        """
        batch = self._check(
            target_logits, draft_token_ids, draft_logits, draft_logsumexp, temperature, seeds, positions
        )
        backend = backends.choose(self.backend, target_logits)
        if backend is eager:
            return
        backend.warm_up(self.method, batch, self.schedule)
        if draft_logits is not None and draft_logits.shape[1] > 0:
            self.draft(draft_logits[:, 0], temperature, seeds, positions)

    def _check(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None,
        draft_logsumexp: Tensor | None,
        temperature: float | Tensor,
        seeds: int | Tensor | None,
        positions: Tensor | None,
    ) -> VerificationBatch:
        """Return a call's arguments, checked."""
        batch = VerificationBatch.check(
            target_logits, draft_token_ids, draft_logits, draft_logsumexp, temperature, seeds, positions
        )
        if self.schedule is not None and batch.draft_token_ids.shape[1] > self.schedule.num_draft_tokens:
            most, got = self.schedule.num_draft_tokens, batch.draft_token_ids.shape[1]
            raise ValueError(
                f"draft_token_ids: expected at most {most} drafts, as many as the schedule has rates, got {got}"
            )
        return batch

    def draft(
        self,
        logits: Tensor,
        temperature: float | Tensor = 1.0,
        seeds: int | Tensor | None = None,
        positions: Tensor | None = None,
        *,
        offset: int = 0,
    ) -> DraftOutput:
        """Draw one draft token per request with the noise that this sampler's method wants.

        `"strict"` wants its drafts to share the target's noise, which is what makes them agree; every other method must
        have drafts that do not, or its output is not distributed as the target's. This method cannot pick the wrong one.

        `"block"` looks at the noise of all drafts of a step, those that it rejects too, and the next step drafts the same
        positions again. Were that noise used again, a request that keeps its seed over steps would not get the target's
        law. So pass the offset, by which each step's drafts have noise of their own; the other methods ignore it.

        Args:
            logits: [batch, vocab] the draft model's raw logits.
            temperature: as for the sampler.
            seeds: as for the sampler; pass the same ones.
            positions: [batch] int64, the absolute position of the token drawn; None means 0.
            offset: which of its step's drafts it is, counted from 0.

        Returns:
            Token ids, and the logsumexp that verification takes as `draft_logsumexp`.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value.

        Example:
            >>> import torch
            >>> from specdecode import RejectionSampler
            >>> logits, positions = torch.tensor([[0.0, 9.0]]), torch.tensor([12])
            >>> draft = RejectionSampler("strict").draft(logits, seeds=0, positions=positions)
            >>> draft.token_ids, draft.logsumexp
            (tensor([1]), tensor([9.0001]))
        """
        batch = RowBatch.check(logits, temperature, seeds, positions)
        offset = check_count("offset", offset, most=MOST_DRAFT_TOKENS - 1, least=0)
        domains = SELECT if self.method == "strict" else draft_domains(offset if self.method == "block" else 0)
        return DraftOutput(*backends.choose(self.backend, logits).sample(batch, domains))
