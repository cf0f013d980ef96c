"""The number of drafts to verify: lengths that maximise expected tokens per unit of time, from acceptance known in advance.

A draft may be left out by anything known before it is drawn, never because of what it is: `reference.planning` has the proof
and counter-examples.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdecode.arguments import MOST_DRAFT_TOKENS, check_count, check_tensor, check_type, check_values, on_host, shown
from specdecode.batch import SamplerOutput, TreeOutput

FLOATS, INTEGERS = (torch.float32, torch.float64), (torch.int32, torch.int64)


class DraftPlanner:
    """Learn the acceptance rate of each position, and plan the lengths of the next step.

    The plan comes from past steps alone, so the output stays exact with every method. Neither `update` nor `plan` waits for
    the device, and both can be captured in a CUDA graph once the planner is on the GPU.

    The rate of position i is accepted / judged drafts there; a draft is judged if all drafts before it were accepted. In
    each step all counts are multiplied by `decay`, so that old steps are forgotten. One imaginary draft is added to each
    position. Its rate is the rate of all earlier positions together, with one accepted draft added, so it is 1 at first.
    Counts fade and the imaginary draft does not: long drafts are tried first, and tried again after some time. The rates
    of a group have one imaginary draft with the rate of all groups.

    Args:
        num_draft_tokens: K, the most draft tokens of a request, at least 1.
        cost: cost[t] > 0 is the time of a target call of t tokens (one per request and one per draft), in any unit: numbers,
            or a float tensor. No planned call has more than len(cost) - 1 tokens. cost[0] is not used. With a tensor,
            counts and plans are on its device; with numbers on the CPU, until the first update moves them to its output's.
        decay: the weight of a step relative to the next one, above 0 and at most 1.
        num_groups: groups of requests with rates of their own. Plan by `specdecode.plan(planner.acceptance[groups], cost)`.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument of the wrong shape or value.

    Example:
        Calls of up to 8 tokens take 10 units, each further token 5 more. Only the first draft is ever accepted.

        >>> import torch
        >>> from specdecode import DraftPlanner, RejectionSampler
        >>> planner = DraftPlanner(num_draft_tokens=3, cost=[10] * 9 + [15, 20, 25])
        >>> target_logits = torch.eye(5)[[3, 3, 3, 3]].expand(2, 4, 5)
        >>> output = RejectionSampler("strict")(target_logits, torch.tensor([[3, 4, 4], [3, 4, 4]]), temperature=0.0)
        >>> for _ in range(50):
        ...     planner.update(output)
        >>> planner.acceptance.round(decimals=2).tolist()
        [1.0, 0.01, 0.5]
        >>> planner.plan(5)
        tensor([1, 1, 1, 0, 0])
    """

    def __init__(
        self, num_draft_tokens: int, cost: Sequence[float] | Tensor, *, decay: float = 0.99, num_groups: int = 1
    ) -> None:
        self.num_draft_tokens = check_count("num_draft_tokens", num_draft_tokens, MOST_DRAFT_TOKENS)
        if not isinstance(decay, int | float):
            raise TypeError(f"decay: expected a number, got {shown(decay)} ({type(decay).__name__})")
        if not 0 < decay <= 1:
            raise ValueError(f"decay: expected a number above 0 and at most 1, got {shown(decay)}")
        self.decay = decay
        self.num_groups = check_count("num_groups", num_groups)
        self._cost = _check_cost(cost)
        shape = (2, self.num_groups, self.num_draft_tokens)  # accepted and judged drafts
        self._counts = torch.zeros(shape, dtype=torch.float64, device=self._cost.device)
        self._has_device = isinstance(cost, Tensor)

    def update(self, output: SamplerOutput | TreeOutput, groups: Tensor | None = None) -> None:
        """Count one verification step, without synchronising.

        Args:
            output: the result of a verification of at most `num_draft_tokens` drafts per request, or of trees that deep.
            groups: [batch] int32 or int64, the group of each request; other numbers: not counted. None: group 0.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: `output` holds more draft tokens than `num_draft_tokens`; an argument of another shape or device.
        """
        if not isinstance(output, SamplerOutput | TreeOutput):
            raise TypeError(f"output: expected a SamplerOutput or TreeOutput, got {type(output).__name__}")
        width, most = output.token_ids.shape[1] - 1, self.num_draft_tokens
        if width > most:
            raise ValueError(f"output: expected at most num_draft_tokens = {most} drafts per request, got {width}")
        accepted, drafted = output.num_accepted[:, None], output.num_draft_tokens[:, None]
        device = accepted.device
        if not self._has_device:
            self._cost, self._counts, self._has_device = self._cost.to(device), self._counts.to(device), True
        if device != self._counts.device:
            raise ValueError(f"output: expected on {self._counts.device}, where the planner is, got {device}")
        if groups is None:
            groups = torch.zeros_like(output.num_accepted)
        check_tensor("groups", groups, INTEGERS, tuple(output.num_accepted.shape), device)
        positions = torch.arange(most, device=device)
        is_accepted = accepted > positions
        is_judged = (accepted >= positions) & (drafted > positions)
        is_member = groups == torch.arange(self.num_groups, device=device)[:, None]
        self._counts.mul_(self.decay).add_(is_member.double() @ torch.stack((is_accepted, is_judged)).double())

    @property
    def acceptance(self) -> Tensor:
        """The conditional acceptance, float64: [num_draft_tokens], of several groups [num_groups, num_draft_tokens]."""
        accepted, judged = self._counts
        return self._rates() if self.num_groups == 1 else (accepted + self._rates()) / (judged + 1)

    def plan(self, num_requests: int, budget: int | None = None) -> Tensor:
        """Return the lengths for the next step, [num_requests] int64, without synchronising.

        All requests have the rates of all groups together, so lengths differ by at most 1, the longer ones first.

        Args:
            num_requests: the number of requests, at least 1 and at most len(cost) - 1.
            budget: the most drafts of all requests together, chosen before this step's drafts are drawn. None: no limit.

        Raises:
            TypeError: an argument is not an int.
            ValueError: an argument is too small or too large.
        """
        check_count("num_requests", num_requests, len(self._cost) - 1)
        most = len(self._cost) if budget is None else check_count("budget", budget, least=0)
        return _plan(self._rates().cumprod(0).expand(num_requests, -1), self._cost[: num_requests + 1 + most])

    def _rates(self) -> Tensor:
        """Return the conditional acceptance by position, all groups together, [num_draft_tokens] float64."""
        accepted, judged = counts = self._counts.sum(1)
        accepted_before, judged_before = counts.cumsum(1) - counts
        rates: Tensor = (accepted + (accepted_before + 1) / (judged_before + 1)) / (judged + 1)
        return rates


def plan(acceptance: Tensor, cost: Sequence[float] | Tensor, most: Tensor | None = None) -> Tensor:
    """Return the lengths that maximise (expected tokens) / cost, [num_requests] int64; of equal plans the shortest.

    `acceptance` must be known before the drafts are drawn. Confidences of this step's drafts, passed here, would let a draft
    decide whether it is verified, and change the distribution with `probabilistic` and `block`. With a tensor for `cost`
    nothing waits for the device.

    Args:
        acceptance: [num_requests, num_draft_tokens] float32 or float64, the probability that a draft is accepted if those
            before it are.
        cost: cost[t] > 0 is the time of a target call of t tokens (one per request and one per draft), in any unit: numbers,
            or a float tensor on the device of `acceptance`. No planned call has more than len(cost) - 1 tokens.
        most: [num_requests] int32 or int64, the most drafts of each request. None: num_draft_tokens.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: an argument of the wrong shape, device or value. Values on a CUDA device are not checked.

    Example:
        >>> import torch
        >>> from specdecode import plan
        >>> acceptance = torch.tensor([[0.9, 0.5], [0.5, 0.8]])
        >>> plan(acceptance, cost=[8, 9, 10, 11, 12, 26, 28])  # a fifth token makes the call slow
        tensor([1, 1])
    """
    check_type("acceptance", acceptance, FLOATS)
    if acceptance.ndim != 2 or 0 in acceptance.shape:
        raise ValueError(f"acceptance: expected shape [num_requests, num_draft_tokens], got {list(acceptance.shape)}")
    if on_host(acceptance):
        check_values("acceptance", acceptance, (acceptance >= 0) & (acceptance <= 1), "values in [0, 1]")
    device = acceptance.device
    costs = _check_cost(cost)
    if isinstance(cost, Tensor) and cost.device != device:
        raise ValueError(f"cost: expected on {device}, where acceptance is, got {cost.device}")
    if len(costs) <= len(acceptance):
        raise ValueError(f"cost: expected more than num_requests = {len(acceptance)} values, got {len(costs)}")
    joint_rates = acceptance.double().cumprod(1)
    if most is not None:
        check_tensor("most", most, INTEGERS, (len(acceptance),), device)
        joint_rates.masked_fill_(torch.arange(joint_rates.shape[1], device=device) >= most[:, None], -torch.inf)
    return _plan(joint_rates, costs.to(device))


def _plan(joint_rates: Tensor, cost: Tensor) -> Tensor:
    """Return the lengths for joint rates [num_requests, num_draft_tokens], -inf where there is no draft."""
    num_requests = len(joint_rates)
    by_offset = joint_rates.T.flatten()  # a stable sort keeps the earlier offset first
    largest, drafts = by_offset.sort(descending=True, stable=True)
    largest = largest[: len(cost) - 1 - num_requests]
    tokens = num_requests + torch.cat((largest.new_zeros(1), largest.cumsum(0)))
    num_drafts = (tokens / cost[num_requests : num_requests + len(tokens)]).argmax()
    is_verified = torch.arange(len(drafts), device=drafts.device) < num_drafts
    return torch.zeros_like(drafts[:num_requests]).scatter_add(0, drafts % num_requests, is_verified.long())


def _check_cost(cost: Sequence[float] | Tensor) -> Tensor:
    """Return the costs as [tokens + 1] float64."""
    if isinstance(cost, Tensor):
        check_type("cost", cost, FLOATS)
        costs = cost.detach().to(torch.float64, copy=True)
    else:
        try:
            costs = torch.tensor([float(each) for each in cost], dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"cost: expected numbers or a tensor, got {shown(cost)}") from error
    if costs.ndim != 1 or len(costs) < 2:
        raise ValueError(f"cost: expected shape [tokens + 1] with at least 2 values, got {list(costs.shape)}")
    if on_host(costs):
        is_unused = torch.arange(len(costs)) == 0  # there is no call of 0 tokens
        check_values("cost", costs, is_unused | (costs.isfinite() & (costs > 0)), "finite values above 0")
    return costs
