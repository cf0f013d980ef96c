"""Planning: how many drafts of each request to verify, and the rules for it that keep the output exact.

*Which rules are exact.* A rule decides whether request r offers a draft at offset i, that is, whether K > i. Let F_i be all
that is known before x_i is drawn: the text, the drafts x_0, ..., x_{i-1}, the rows p and q at i, earlier steps, other
requests, and random numbers of the rule's own; but not the numbers that this step's drafts are accepted with. If every
event K > i is decided by F_i, `probabilistic` and `block` stay exact.

Proof for `probabilistic`. Let drafts 0 to i - 1 be accepted. Given F_i and K > i, x_i is still drawn from q, because F_i
knew K > i before the draw. So accepting it, or drawing from the residual, emits v with probability min(p, q) + max(0, p -
q) = p(v). Given F_i and K = i, the bonus token is drawn from p. In both cases the token at i has the distribution p given
F_i. By induction over i the tokens have the target's joint distribution.

Proof for `block`. Claim: P(tau >= i | F_i, K >= i) = c_i. If K = i, the last draft is accepted with probability c_i. If K >
i, the proof for a fixed K needs two facts: x_i is drawn from q given F_i, and P(tau >= i + 1 | F_{i+1}, K > i) = c_{i+1}.
The first holds as above, the second by induction from the largest K down.

In `strict` every emitted token is the target's own sample, so every rule is exact. An argmax draft is a function of F_i, so
a rule may look at it.

*Which rules are not.* Three examples with two tokens:

- Leave a draft out because it is unlikely. p = q = (2/3, 1/3); the draft 1 is left out. Then token 0 has probability 2/3 +
  1/3 * 2/3 = 8/9 instead of 2/3.
- Let confidences of this step set the budget. p = q = (1/2, 1/2) at offset 0. After token 0 draft 1 is accepted for
  certain, after token 1 never. Calls of 1, 2, 3 tokens cost 1, 2, 2. The best number of drafts is 2 after token 0 and 0
  after token 1, where the draft 1 is dropped. Then token 0 has probability 1/2 + 1/2 * 1/2 = 3/4 instead of 1/2.
- Choose the length after the decisions: cut before the first rejected draft and draw a bonus token. p = (3/4, 1/4), q =
  (1/2, 1/2). Token 0 has probability 1/2 + 1/4 * 3/4 = 11/16 instead of 3/4.

*The best lengths.* Let a_j be the probability that draft j is accepted, given that those before it are. Draft i of a
request is accepted with its *joint rate* J_i = a_0 a_1 ... a_i. A step of n requests emits on average n + (the sum of J
over all drafts). Along a request J never increases. So the B largest joint rates of the batch are prefixes of the requests'
drafts (of equal ones take the earlier offset first), and no B drafts have a larger sum. To choose B, try all of them.
Stopping at the first B that is worse than the one before it can miss the best, because measured costs have steps.

Left out: where the acceptance comes from. It must be known before the drafts are drawn.
"""

import numpy as np


def plan(acceptance, cost, most=None):
    """Return the lengths that maximise (expected tokens) / cost, [num_requests]; of equal plans the one with fewest drafts.

    Args:
        acceptance: [num_requests, num_draft_tokens] conditional acceptance, known before the drafts are drawn.
        cost: cost[t] > 0 is the time of a target call of t tokens, one per request and one per draft. No call is longer than
            the list.
        most: [num_requests] the most drafts of each request; None: num_draft_tokens.

    The joint rates are (0.9, 0.45) and (0.5, 0.4). Calls of 2, 3, 4, 5, 6 tokens emit 2, 2.9, 3.4, 3.85, 4.25. With a cost
    of 8 + t the ratios are 0.2, 0.264, 0.283, 0.296, 0.304: verify all. With calls of more than 4 tokens at twice that
    cost, verify one draft of each request.

    >>> acceptance = [[0.9, 0.5], [0.5, 0.8]]
    >>> plan(acceptance, [8, 9, 10, 11, 12, 13, 14]).tolist()
    [2, 2]
    >>> plan(acceptance, [8, 9, 10, 11, 12, 26, 28]).tolist()
    [1, 1]
    >>> plan(acceptance, [8, 9, 10, 11, 12, 13, 14], most=[0, 2]).tolist()
    [0, 2]
    """
    num_requests, num_draft_tokens = np.shape(acceptance)
    limits = np.full(num_requests, num_draft_tokens) if most is None else np.asarray(most)
    joint_rates = np.cumprod(acceptance, axis=1)
    drafts = [(r, i) for i in range(num_draft_tokens) for r in range(num_requests) if i < limits[r]]
    drafts.sort(key=lambda draft: -joint_rates[draft])  # stable: of equal rates the earlier offset stays first
    lengths = best_lengths = np.zeros(num_requests, dtype=int)
    tokens = num_requests
    best_ratio = tokens / cost[num_requests]
    for size, (request, offset) in zip(range(num_requests + 1, len(cost)), drafts):
        lengths = lengths.copy()
        lengths[request] = offset + 1
        tokens += joint_rates[request, offset]
        if tokens / cost[size] > best_ratio:
            best_ratio, best_lengths = tokens / cost[size], lengths
    return best_lengths
