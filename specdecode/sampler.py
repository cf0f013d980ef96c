"""RejectionSampler: check the arguments, pass the bundle of tensors to a backend, return the `SamplerOutput`."""

from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor

from specdecode import backends, eager, sharding, validation
from specdecode.adjustments import Adjustments
from specdecode.arguments import (
    MOST_DRAFT_TOKENS,
    MOST_SIBLINGS,
    CommonOptions,
    Options,
    check_choice,
    check_count,
    check_rows,
    check_tree,
    check_verification,
    select,
)
from specdecode.backends import Backend, breaks_graph
from specdecode.batch import TARGET_ONLY, Logprobs, SamplerOutput, Sampling, TreeBatch, TreeOutput, VerificationBatch
from specdecode.drafting import DraftOutput, draw
from specdecode.noise import SELECT, draft_domains
from specdecode.sharding import VocabShard, check_shard
from specdecode.synthetic import AcceptanceSchedule
from specdecode.validation import Validate

Method = Literal["strict", "probabilistic", "block", "synthetic"]


class RejectionSampler:
    """Decide which draft tokens are accepted and which token comes next, given the target model's logits.

    | method | accepts draft x at a position | on rejection emits |
    |---|---|---|
    | `"strict"` | iff x equals the target's own seeded sample y | y |
    | `"probabilistic"` | with probability min(1, p(x) / q(x)) | a draw from max(0, p - q), normalised |
    | `"block"` | jointly with the drafts before it | a draw from max(0, c p - q), normalised |
    | `"synthetic"` | at the scheduled rate, for any logits | the token of the method that it imitates |

    p is softmax(target_logits / temperature) and q is softmax(draft_logits / temperature). If all drafts of a request are
    accepted, a bonus token is drawn from p. Requests of temperature 0 are greedy: a draft is accepted iff it is the
    argmax of the raw target logits (`"synthetic"` keeps to its schedule), and the argmax is emitted.

    `"strict"` returns, token for token, the output of [`sample`][specdecode.sample] without drafts. The output of
    `"probabilistic"` and `"block"` has exactly the distribution of the target's own samples if every draft was drawn from
    its q, either by [`draft`][specdecode.RejectionSampler.draft] or with random numbers independent of this sampler's.
    Drafts that were not drawn, for example by n-gram look-up or as an argmax, require `draft_logits=None`.

    `"block"` decides on the drafts of a request together. Its running ratio c is 1 before the first draft, and each draft x
    makes it min(1, c p(x) / q(x)). For drafts drawn from q, the first i drafts are all accepted with probability c_i, given
    these i drafts, and no exact method that sees one draft path accepts more drafts on average. Without draft logits it
    accepts the same drafts as `"probabilistic"`.

    `"synthetic"` is for load tests. It costs the same as `"probabilistic"` with the same arguments (without draft logits,
    the same as `"strict"`), and only the decision to accept is scheduled.

    Args:
        method: `"strict"`, `"probabilistic"`, `"block"` or `"synthetic"`.
        backend: `"triton"`: kernels for NVIDIA GPUs, which compute in float32. They round float64 logits to float32, so
            logits that become equal are ties, also for greedy requests. `"eager"`: batched PyTorch for any device, in
            float64 for float64 logits. `"auto"`: Triton for logits on a GPU, and eager elsewhere.
        schedule: the acceptance rates of `"synthetic"`. Required for `"synthetic"`, refused for the other methods.
        shard: under tensor parallelism, the part of the vocabulary that this rank's logits cover. Every rank calls the
            sampler with its part and otherwise the same arguments, verifies whole rows of its share of the requests, and
            gets the output of all requests. None: logits cover the whole vocabulary.
        validate: `"values"`: each call, also of `draft`, raises a ValueError for probabilities passed as logits, that is, if
            no number is negative and each row sums to 1, within rounding, in all rows that the call may read. The check
            reads all logits and waits for the device, so it is for development, and an error while a CUDA graph is
            captured. None: probabilities are not detected, and tokens come from a nearly flat distribution.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an unknown method, backend or validation, a missing schedule, or a schedule for a method other than
            `"synthetic"`.

    Example:
        >>> import torch
        >>> from specdecode import RejectionSampler
        >>> sampler = RejectionSampler("probabilistic")
        >>> draft_logits = torch.tensor([1.0, 2.0, 0.0, 0.0]).expand(2, 3, 4)  # 2 requests, 3 drafts, 4 tokens
        >>> target_logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(2, 4, 4)  # one row more than drafts
        >>> options = {"temperature": 0.7, "seeds": torch.tensor([12, 13])}  # one seed per request
        >>> positions = torch.tensor([12, 40])  # tokens that each request has so far
        >>> steps = [sampler.draft(draft_logits[:, i], positions=positions + i, offset=i, **options) for i in range(3)]
        >>> draft_token_ids = torch.stack([step.token_ids for step in steps], dim=1)
        >>> draft_token_ids
        tensor([[0, 2, 1],
                [0, 1, 1]])
        >>> draft_logsumexp = torch.stack([step.logsumexp for step in steps], dim=1)
        >>> output = sampler(
        ...     target_logits,
        ...     draft_token_ids,
        ...     draft_logits,
        ...     positions=positions,
        ...     draft_logsumexp=draft_logsumexp,
        ...     **options,
        ... )
        >>> output.token_ids  # 3 drafts accepted, then bonus token 0; 1 draft accepted, then 0 recovered in place of 1
        tensor([[ 0,  2,  1,  0],
                [ 0,  0, -1, -1]])
        >>> output.num_accepted
        tensor([3, 1], dtype=torch.int32)

    References:
        Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023, arXiv 2302.01318, algorithm 2
        (`"probabilistic"`). Sun et al. 2024, arXiv 2403.10444, algorithm 2 (`"block"`). Daliri et al. 2024, arXiv
        2408.07978 (`"strict"`).
    """

    def __init__(
        self,
        method: Method,
        *,
        backend: Backend = "auto",
        schedule: AcceptanceSchedule | None = None,
        shard: VocabShard | None = None,
        validate: Validate | None = None,
    ) -> None:
        check_choice("method", method, get_args(Method))
        check_choice("backend", backend, get_args(Backend))
        if validate is not None:
            check_choice("validate", validate, get_args(Validate))
        if schedule is not None and not isinstance(schedule, AcceptanceSchedule):
            raise TypeError(f"schedule: expected an AcceptanceSchedule, got {type(schedule).__name__}")
        if method == "synthetic" and schedule is None:
            raise ValueError("schedule: method 'synthetic' needs one, such as AcceptanceSchedule.from_mean_rate(...)")
        if method != "synthetic" and schedule is not None:
            raise ValueError(f"schedule: only method 'synthetic' takes one, got one for {method!r}")
        if shard is not None:
            check_shard(shard)
        self.method = method
        self.backend = backend
        self.schedule = schedule
        self.shard = shard
        self.validate = validate

    def __repr__(self) -> str:
        """Return the call that makes this sampler."""
        schedule = "" if self.schedule is None else f", schedule={self.schedule!r}"
        shard = "" if self.shard is None else f", shard={self.shard!r}"
        validate = "" if self.validate is None else f", validate={self.validate!r}"
        return f"RejectionSampler({self.method!r}, backend={self.backend!r}{schedule}{shard}{validate})"

    @breaks_graph
    def __call__(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None = None,
        *,
        temperature: float | Tensor = 1.0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
        min_p: float | Tensor | None = None,
        draft_sampling: Sampling | None = None,
        seeds: int | Tensor | None = None,
        positions: Tensor | None = None,
        draft_logsumexp: Tensor | None = None,
        draft_cutoff: Tensor | None = None,
        draft_vocab_ids: Tensor | None = None,
        logprobs: Logprobs | None = None,
        adjustments: Adjustments | None = None,
        top_logprobs: int | None = None,
        kept_sets: bool = False,
    ) -> SamplerOutput:
        """Verify one step of drafts.

        A request's result depends only on its own logits, drafts, temperature, seed and positions: not on the batch, its
        slot or the padding.

        Under torch.compile a call breaks the graph, and is not compiled.

        Args:
            target_logits: [batch, num_draft_tokens + 1, vocab] raw logits, float16, bfloat16, float32 or float64. Row i
                is the target's distribution of the token at draft i, the last row of the bonus token. Any strides are
                allowed; the kernels are fastest if strides and vocabulary size are multiples of 16. NaN counts as -inf; a
                row with +inf is the point mass on its first +inf.
            draft_token_ids: [batch, num_draft_tokens] int32 or int64. -1 ends a request's drafts: it and later entries
                are ignored, and the row at the -1 gives the bonus token.
            draft_logits: [batch, num_draft_tokens, vocab] raw logits that the drafts were drawn from, with the target's
                sampling parameters or with `draft_sampling`. None means a deterministic drafter (n-gram look-up, greedy).
                `"strict"` does not use them.
            temperature: one number >= 0 or a [batch] float tensor; 0 is greedy.
            top_k: keep the k tokens with the largest logits, and the lower ids of equal logits: an int >= 0 or a [batch]
                int32 or int64 tensor. None, 0 and numbers >= the vocabulary size keep all tokens; 1 is greedy.
            top_p: keep the most likely tokens until their probability reaches top_p: a number in (0, 1] or a [batch]
                float tensor. None and 1 keep all tokens.
            min_p: keep the tokens whose probability is at least min_p times the largest: a number in [0, 1] or a [batch]
                float tensor. None and 0 keep all tokens. The order is temperature, min_p, top_k, top_p; each applies to
                the tokens that the previous rules have kept. Backend `"auto"` is eager for truncated calls of more than
                27 drafts (except with `"block"`), and for truncated calls with drafts that were drawn at another
                temperature.
            draft_sampling: the sampling parameters that the drafts were drawn with, if they differ from the target's;
                numbers for all requests or [batch] tensors. The output stays exact provided this describes how the drafts
                were drawn.
            seeds: [batch] int64; an int s means s, s + 1, ...; None draws them from torch's default generator.
            positions: [batch] int64, the absolute position in its sequence of each request's first draft token; None
                means 0. A request that keeps its seed over several steps must pass them: otherwise its noise repeats.
            draft_logsumexp: [batch, num_draft_tokens] float32 from [`draft`][specdecode.RejectionSampler.draft]. It saves
                reading the draft rows again, except in the eager backend.
            draft_cutoff: [batch, num_draft_tokens] int64 from [`draft`][specdecode.RejectionSampler.draft]; required with
                draft_logsumexp if the drafts were drawn from truncated rows.
            draft_vocab_ids: [draft_vocab] int32 or int64, if the drafter has only some of the target's tokens: the target
                id of each draft token, distinct and in any order. Then draft_logits are [batch, num_draft_tokens,
                draft_vocab], q is 0 for all other tokens, and draft rows are truncated in the order of the draft's ids.
                `draft_token_ids` are target ids. For drafts from [`draft`][specdecode.RejectionSampler.draft], pass
                `draft_vocab_ids[draft.token_ids]`, and pass the logsumexp and the cutoff (a draft id) unchanged. These
                drafts have the noise of the draft's ids, not of the target's, so `"strict"` accepts fewer. None:
                draft_logits are over the target's tokens.
            logprobs: the distribution for the log-probabilities of emitted tokens. `"processed"`: the target's row with
                temperature and truncation applied, for accepted, recovered and bonus tokens. It gives 0 for greedy
                requests, which sample from a point mass, and -inf for drafts that the target never emits, which only
                `"synthetic"` accepts. `"raw"`: softmax(logits), at temperature 1 and untruncated, also for greedy
                requests. None: no log-probabilities.
            adjustments: biases, penalties and masks, applied to target rows before the temperature; see
                [`Adjustments`][specdecode.Adjustments]. "Raw" log-probabilities use the logits without them.
            top_logprobs: the number of likeliest tokens to return for each emitted token's row, with their
                log-probabilities, at most 20. Requires `logprobs`, which defines the distribution. A greedy row has one
                such token with "processed". None and 0: no lists.
            kept_sets: whether to return the kept tokens of each emitted token's row: the tokens with a positive
                probability in the sampled distribution. These are the tokens that truncation keeps; in rows that are not
                truncated, every token with a finite logit; in greedy rows, one token. `top_logprobs` and `kept_sets`
                together need one more launch.

        Returns:
            Accepted drafts and one more token, with counts.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value, or `backend="triton"` where it cannot run. On a
                CUDA device values are not checked: an id outside the vocabulary counts as -1, a temperature that is NaN
                or negative as 0, a negative top_k as 0, a top_p or min_p that is NaN as None, and a min_p above 1 as 1; a
                top_p of 0 or less keeps one token. In draft_vocab_ids, ids outside the vocabulary are ignored, and of
                equal ids the first counts.

        Example:
            >>> import torch
            >>> from specdecode import RejectionSampler
            >>> target_logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(2, 2, 3)  # 2 requests, 1 draft each
            >>> drafts, sampler = torch.tensor([[0], [2]]), RejectionSampler("probabilistic")
            >>> output = sampler(target_logits, drafts, seeds=2, top_k=2, logprobs="processed")
            >>> output.token_ids  # draft 2 is not one of the two kept tokens
            tensor([[ 0,  0],
                    [ 1, -1]])
            >>> output.logprobs.exp()  # 0.5 / 0.8 and 0.3 / 0.8
            tensor([[0.6250, 0.6250],
                    [0.3750,    nan]])
            >>> sampler(target_logits, drafts, seeds=2, top_k=2, logprobs="raw").logprobs.exp()
            tensor([[0.5000, 0.5000],
                    [0.3000,    nan]])
        """
        return self._verify(
            check_verification(
                target_logits,
                draft_token_ids,
                draft_logits,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                draft_sampling=draft_sampling,
                seeds=seeds,
                positions=positions,
                draft_logsumexp=draft_logsumexp,
                draft_cutoff=draft_cutoff,
                draft_vocab_ids=draft_vocab_ids,
                logprobs=logprobs,
                adjustments=adjustments,
                top_logprobs=top_logprobs,
                kept_sets=kept_sets,
                vocab_size=self._vocab_size,
            )
        )

    @breaks_graph
    def packed(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        row_starts: Tensor,
        draft_logits: Tensor | None = None,
        *,
        num_draft_tokens: int,
        slots: Tensor | None = None,
        row_positions: Tensor | None = None,
        **options: Unpack[Options],
    ) -> SamplerOutput:
        """Verify one step of drafts with packed rows and state in slots, as in serving engines.

        Each request gets the same result as in a call of the sampler. The kernels pad, gather and copy nothing, and the
        host does not read lengths and slots: a replayed CUDA graph may change them.

        The state of request r in a tensor by slot, [num_slots, ...], is at `slots[r]`. Slots may be shared and unused.

        Args:
            target_logits: [num_rows, vocab] raw logits. Request r has the rows from `row_starts[r]` to
                `row_starts[r + 1] - 1`: one for each of its drafts, and one more for the bonus token.
            draft_token_ids: [num_rows] int32 or int64, the draft that each row judges. The entry of a request's last row
                is ignored, so the last entry may be omitted: if `fed` are the ids that an engine has fed at the rows,
                pass `fed[1:]`. -1 ends a request's drafts, as in a call of the sampler.
            row_starts: [batch + 1] int32 or int64. A request without rows, such as those that pad a batch, emits token 0
                and is marked invalid. Rows after the last request's are ignored.
            draft_logits: [num_slots, num_draft_tokens, vocab] raw logits, by slot; or None.
            num_draft_tokens: the largest possible number of drafts of a request.
            slots: [batch] int32 or int64; None means that the slot of request r is r. Ignored if no argument is by slot.
            row_positions: [num_rows] int64, in place of positions: the absolute position of the token that was fed at
                each row. A request's first draft is one position after its first row; the entries of other rows are
                ignored.
            **options: the keyword arguments of a call. `positions` is by request, [batch]; `adjustments.allowed_mask` is
                by row, [num_rows, ...]; all other tensors are by slot, [num_slots, ...] in place of [batch, ...]. A
                number s as `seeds` means s + r for request r, and None draws one for each request.

        Returns:
            As for a call: [batch, num_draft_tokens + 1] token ids, and counts.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: an argument of the wrong shape, device or value. On a CUDA device values are not checked: a
                request with rows outside target_logits, with more than num_draft_tokens + 1 rows, or with a slot out of
                range emits token 0 and is marked invalid.

        Example:
            >>> import torch
            >>> from specdecode import RejectionSampler
            >>> target_logits = torch.zeros(5, 8)
            >>> target_logits[:, 3] = 9.0
            >>> row_starts = torch.tensor([0, 3, 4, 5])  # two drafts, and twice none
            >>> draft_token_ids = torch.tensor([3, 7, -1, -1, -1])
            >>> slots = torch.tensor([2, 0, 2])
            >>> temperature = torch.tensor([0.0, 1.0, 0.0])  # of slot 0, 1 and 2
            >>> options = {"num_draft_tokens": 2, "slots": slots, "temperature": temperature}
            >>> RejectionSampler("strict").packed(target_logits, draft_token_ids, row_starts, **options).token_ids
            tensor([[ 3,  3, -1],
                    [ 3, -1, -1],
                    [ 3, -1, -1]])
        """
        if row_starts is None:  # `check_verification` would treat the call as padded
            raise TypeError("row_starts: expected a torch.Tensor, got NoneType")
        rows: Any = {"row_starts": row_starts, "num_draft_tokens": num_draft_tokens, "slots": slots}
        rows |= {"row_positions": row_positions, "vocab_size": self._vocab_size}
        return self._verify(check_verification(target_logits, draft_token_ids, draft_logits, **rows, **options))

    @breaks_graph
    def tree(
        self,
        target_logits: Tensor,
        token_ids: Tensor,
        parents: Tensor,
        *,
        max_depth: int,
        row_starts: Tensor | None = None,
        slots: Tensor | None = None,
        **options: Unpack[CommonOptions],
    ) -> TreeOutput:
        """Verify one tree of drafts for each request, by the walk: follow the child that is the target's own token.

        The target's own token at a node is drawn with the noise of its position, as in [`sample`][specdecode.sample]. So
        the text equals plain seeded sampling, token for token, for every tree, however it was drawn, cut or reordered; no
        distribution of the drafts is needed. Only the rows of node 0 and of accepted nodes can change the result; large
        batches read no other rows. Only `"strict"` verifies trees; requests of temperature 0 are greedy.

        Args:
            target_logits: [batch, nodes, vocab] raw logits: row n is the target's distribution of the token after node n.
                In a packed call [num_rows, vocab], node n of request r at row `row_starts[r] + n`. Padded logits are
                copied if the distance in memory between consecutive rows is not constant.
            token_ids: [batch, nodes] int32 or int64. Node 0 is the last token of the text, its id is ignored. A node whose
                id is outside the vocabulary, such as -1, is padding, as are its descendants.
            parents: [batch, nodes] int32 or int64, or [nodes] for all requests: the node before each node, in any order.
                A node whose parent is -1 or not a node is padding; the entry of node 0 is ignored. Of equal siblings the
                lowest node counts.
            max_depth: the most drafts that can be accepted; the number of rounds is one more.
            row_starts: [batch + 1] int32 or int64, of a packed call.
            slots: [batch] int32 or int64, of a packed call, as in [`packed`][specdecode.RejectionSampler.packed].
            **options: the keyword arguments of a call, except those about draft logits. `positions` belong to the first
                token after node 0. `adjustments` count the drafts on the path to a row, and have a mask for each node.

        Returns:
            Accepted drafts and nodes, and one more token.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: another method, a shard, or an argument of the wrong shape, device or value.

        Example:
            >>> import torch
            >>> from specdecode import RejectionSampler
            >>> target_logits = torch.zeros(1, 4, 10)
            >>> target_logits[0, 0, 5] = target_logits[0, 2, 8] = 30.0  # 5 after the text, 8 after node 2
            >>> token_ids, parents = torch.tensor([[0, 7, 5, 9]]), torch.tensor([-1, 0, 0, 2])
            >>> output = RejectionSampler("strict").tree(target_logits, token_ids, parents, max_depth=2, seeds=0)
            >>> output.token_ids, output.nodes  # node 2 is accepted, its child 9 is not
            (tensor([[ 5,  8, -1]]), tensor([[ 2, -1]], dtype=torch.int32))

        References:
            Daliri et al. 2024, arXiv 2408.07978, whose coupled sampling the walk applies at each node.
        """
        rows: Any = {"max_depth": max_depth, "row_starts": row_starts, "slots": slots}
        batch = self._check_tree(target_logits, token_ids, parents, **rows, **options)
        output: TreeOutput = backends.choose(self.backend, target_logits).verify_tree(batch)
        return output

    def warmup_tree(
        self,
        target_logits: Tensor,
        token_ids: Tensor,
        parents: Tensor,
        *,
        max_depth: int,
        row_starts: Tensor | None = None,
        slots: Tensor | None = None,
        **options: Unpack[CommonOptions],
    ) -> None:
        """Compile the kernels that [`tree`][specdecode.RejectionSampler.tree] needs for any number of trees like these.

        Arguments are alike as in [`warmup`][specdecode.RejectionSampler.warmup]; one tree is enough. Numbers of nodes and of
        `max_depth` + 1 are alike if they have the same next power of two.

        Args:
            target_logits: as for `tree`, like the arguments below.
            token_ids: [batch, nodes] int32 or int64.
            parents: [batch, nodes] or [nodes] int32 or int64.
            max_depth: the most drafts that can be accepted.
            row_starts: [batch + 1] int32 or int64, of a packed call.
            slots: [batch] int32 or int64, of a packed call.
            **options: the keyword arguments of a call.

        Raises:
            TypeError: as for `tree`.
            ValueError: as for `tree`.

        Example:
            >>> import torch
            >>> from specdecode import RejectionSampler
            >>> token_ids, parents = torch.tensor([[0, 7, 5, 9]]), torch.tensor([-1, 0, 0, 2])
            >>> RejectionSampler("strict").warmup_tree(torch.zeros(1, 4, 10), token_ids, parents, max_depth=2, seeds=0)
        """
        rows: Any = {"max_depth": max_depth, "row_starts": row_starts, "slots": slots}
        batch = self._check_tree(target_logits, token_ids, parents, **rows, **options)
        backend = backends.choose(self.backend, target_logits)
        if backend is not eager:
            backend.warm_up_tree(batch)

    def _check_tree(self, *arguments: Any, **options: Any) -> TreeBatch:
        """Return the checked arguments of `tree`."""
        if self.method != "strict":
            raise ValueError(
                f"method: {self.method!r} verifies chains only, expected 'strict': "
                "use RejectionSampler('strict').tree, which is exact for every tree and needs no distribution of drafts"
            )
        if self.shard is not None:
            raise ValueError(
                "shard: trees are verified on whole rows; gather the logits, and use a sampler without a shard"
            )
        batch = check_tree(*arguments, **options)
        if self.validate is not None:
            validation.check_tree(batch)
        return batch._replace(rows=batch.rows.greedy_if_equivalent(self.method))

    def warmup(
        self,
        target_logits: Tensor,
        draft_token_ids: Tensor,
        draft_logits: Tensor | None = None,
        *,
        row_starts: Tensor | None = None,
        num_draft_tokens: int | None = None,
        slots: Tensor | None = None,
        row_positions: Tensor | None = None,
        **options: Unpack[Options],
    ) -> None:
        """Compile the kernels that calls with arguments like these need, for any sizes.

        Arguments are alike if they have the same dtypes, and each is a tensor, a number or None in both. A neutral
        number, such as a `top_p` of 1, counts as None; a `top_k` of 1 has its own kernels. Two exceptions depend on
        sizes. Rows or counts that are not aligned to 16 elements and 16 bytes need kernels with narrower loads. More than
        31 drafts or 262,144 tokens need larger kernels. Nothing is compiled for calls that the eager backend takes.
        Triton also keeps compiled kernels on disk. With a shard every rank must call this.

        Args:
            target_logits: as for a call; one request is enough.
            draft_token_ids: as for a call. With no drafts, only the kernels for steps without drafts are compiled.
            draft_logits: as for a call. If given, the kernels of [`draft`][specdecode.RejectionSampler.draft] are
                compiled, too.
            row_starts: if given, the arguments are as for [`packed`][specdecode.RejectionSampler.packed].
            num_draft_tokens: as for a packed call.
            slots: as for a packed call.
            row_positions: as for a packed call.
            **options: the keyword arguments of a call.

        Raises:
            TypeError: as for a call.
            ValueError: as for a call.

        Example:
            >>> import torch
            >>> from specdecode import RejectionSampler
            >>> sampler = RejectionSampler("strict")
            >>> sampler.warmup(torch.zeros(1, 4, 1000), torch.zeros(1, 3, dtype=torch.int64), seeds=0)
        """
        if row_starts is None and any(given is not None for given in (slots, num_draft_tokens, row_positions)):
            names = "slots, num_draft_tokens and row_positions"
            raise ValueError(f"row_starts: needed beside {names}, which only packed calls take")
        rows: Any = {"row_starts": row_starts, "num_draft_tokens": num_draft_tokens, "slots": slots}
        rows |= {"row_positions": row_positions, "vocab_size": self._vocab_size}
        batch = check_verification(target_logits, draft_token_ids, draft_logits, **rows, **options)
        self._check_step(batch)
        batch = batch.greedy_if_equivalent(self.method)
        backend = backends.verifier_of(self.backend, self.method, batch)
        if self.shard is not None:
            batch = sharding.for_warmup(self.shard, self._with_rows_read(batch))
        if backends.choose(self.backend, target_logits) is eager:
            return
        if backend is not eager:
            backend.warm_up(self.method, batch, self.schedule)
        if draft_logits is not None and draft_logits.shape[1] > 0:
            self._warm_up_draft(draft_logits[:1, 0], row_positions is not None, options)

    def _warm_up_draft(self, rows: Tensor, has_positions: bool, options: Options) -> None:
        """Compile the kernels that draw drafts from rows like this one, [1, draft_vocab]."""
        given: Any = {name: options[name] for name in Sampling._fields if name in options}  # type: ignore[literal-required]
        sampling = options.get("draft_sampling") or Sampling(**given)
        arguments: Any = select(sampling, slot=slice(1))._asdict()
        seeds = options.get("seeds")
        arguments["seeds"] = seeds[:1] if isinstance(seeds, Tensor) else seeds
        if has_positions or options.get("positions") is not None:
            arguments["positions"] = rows.new_zeros(1, dtype=torch.int64)
        drafter = self
        if self.shard is not None:
            if options.get("draft_vocab_ids") is None:
                rows = rows.new_zeros(1, self.shard.vocab_size)
            drafter = RejectionSampler(self.method, backend=self.backend, schedule=self.schedule)
        drafter.draft(rows, **arguments)

    def _verify(self, batch: VerificationBatch) -> SamplerOutput:
        """Verify a checked batch by a backend; with a shard, this rank's requests."""
        self._check_step(batch)
        batch = batch.greedy_if_equivalent(self.method)
        # Decided from all requests, so that all ranks agree.
        backend = backends.verifier_of(self.backend, self.method, batch)

        def verify_rows(rows: VerificationBatch) -> SamplerOutput:
            output: SamplerOutput = backend.verify(self.method, rows, self.schedule)
            return output

        if self.shard is None:
            return verify_rows(batch)
        return sharding.verify(self.shard, self._with_rows_read(batch), verify_rows)

    def _with_rows_read(self, batch: VerificationBatch) -> VerificationBatch:
        """Return the batch without draft rows, if the method does not read them."""
        return batch.without_draft_rows if self.method in TARGET_ONLY else batch

    @property
    def _vocab_size(self) -> int | None:
        """Size of the vocabulary that is divided into shards; None without a shard."""
        return None if self.shard is None else self.shard.vocab_size

    def _check_step(self, batch: VerificationBatch) -> None:
        """Raise if the schedule has too few rates; with `validate`, also if logits are probabilities."""
        if self.schedule is not None and batch.num_draft_tokens > self.schedule.num_draft_tokens:
            name = "draft_token_ids" if batch.packing is None else "num_draft_tokens"
            most, got = self.schedule.num_draft_tokens, batch.num_draft_tokens
            raise ValueError(f"{name}: expected at most {most} drafts, as many as the schedule has rates, got {got}")
        if self.validate is not None:
            validation.check_step(batch, self.shard)

    @breaks_graph
    def draft(
        self,
        logits: Tensor,
        temperature: float | Tensor = 1.0,
        seeds: int | Tensor | None = None,
        positions: Tensor | None = None,
        *,
        offset: int = 0,
        top_k: int | Tensor | None = None,
        top_p: float | Tensor | None = None,
        min_p: float | Tensor | None = None,
        width: int | None = None,
    ) -> DraftOutput:
        """Draw one draft token per request, or the children of one node, with the noise that this sampler's method needs.

        With `"strict"`, drafts share the target's noise, which makes them agree more often. With every other method they
        must not share it; otherwise the output would not have the target's distribution. This method always uses the
        right noise.

        `"block"` decides from all drafts of a step, including drafts that it rejects, and the next step drafts some of
        these positions again. With the same noise again, a request that keeps its seed over several steps would not get
        the target's distribution. The offset gives the drafts of each step their own noise, so always pass it; the other
        methods ignore it.

        Args:
            logits: [batch, vocab] the draft model's raw logits, float16, bfloat16, float32 or float64.
            temperature: as for verification; pass the same.
            seeds: as for verification; pass the same.
            positions: [batch] int64, the absolute position of the drawn token; None means 0.
            offset: index of this draft in its step, from 0.
            top_k: as for verification; pass the same, or pass the difference to verification as `draft_sampling`.
            top_p: as `top_k`.
            min_p: as `top_k`.
            width: the number of siblings to draw for [`tree`][specdecode.RejectionSampler.tree], at most 8; only with
                `"strict"`. The first is the token that is drawn without `width`. None: no siblings.

        Returns:
            Token ids, [batch]; with `width` [batch, width], ordered by how likely each is the target's own token, then -1
                if fewer tokens are possible. Also `draft_logsumexp` and `draft_cutoff` for a verification.

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
            >>> RejectionSampler("strict").draft(logits, seeds=0, positions=positions, top_p=0.95).cutoff
            tensor([1])
        """
        if width is not None:
            check_count("width", width, most=MOST_SIBLINGS)
            if self.method != "strict":
                raise ValueError("width: only 'strict' draws siblings, since only it verifies trees")
        domains = self._draft_domains(offset)
        limits: Any = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        batch = check_rows(logits, temperature, seeds, positions, **limits, vocab_size=self._vocab_size)
        if self.validate is not None:
            validation.check_rows(batch, self.shard)
        return DraftOutput(*draw(batch, domains, self.backend, self.shard, width or 0))

    def _draft_domains(self, offset: int) -> tuple[int, int]:
        """Return the noise domains of the draft at an offset in its step; raise unless the offset is valid."""
        offset = check_count("offset", offset, most=MOST_DRAFT_TOKENS - 1, least=0)
        return SELECT if self.method == "strict" else draft_domains(offset if self.method == "block" else 0)
