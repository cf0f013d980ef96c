"""Log-probabilities of the emitted tokens, in one of two senses.

*Processed*: log p'(y) of a token y, where p' is what the target samples from at that row: softmax(logits / T), truncated
and normalised again. Every exact method emits y with this very probability, whether y was accepted, recovered or a bonus
token: see [`probabilistic`][reference.probabilistic]. So the residual, from which a recovered token is drawn after a
rejection, does not appear. It is the distribution of y given the draft that was rejected; p' does not depend on drafts.

*Raw*: log p(y) of softmax(logits), at temperature 1 and with all tokens kept: what the model says, however it is sampled.

At temperature 0 the target samples from a point mass, so the processed log-probability of the argmax is 0. That is also
the limit T -> 0, if no other token has the same logit. Engines that divide by the temperature only where it is not 0 return
what is called raw here.

Left out: log-probabilities of tokens that were not emitted, such as the k most likely ones.
"""

import numpy as np

from reference.selection import log_softmax
from reference.truncation import Sampling, truncate_rows


def processed_logprobs(target_logits, token_ids, sampling: Sampling):
    """Return log p'(y) of each emitted token y.

    It is -inf for a token that the target never emits: only synthetic verification accepts such drafts.

    Args:
        target_logits: [rows, vocab] raw logits, a row for each emitted token or more.
        token_ids: [num_tokens] emitted tokens.
        sampling: how the target samples.

    >>> row = np.log([0.5, 0.3, 0.2])
    >>> np.exp(processed_logprobs([row], [1], Sampling())).round(6).tolist()
    [0.3]
    >>> np.exp(processed_logprobs([row], [1], Sampling(top_k=2))).round(6).tolist()  # 0.3 / (0.5 + 0.3)
    [0.375]
    >>> np.exp(processed_logprobs([row], [1], Sampling(temperature=0.5))).round(6).tolist()  # 0.09 / (0.25 + 0.09 + 0.04)
    [0.236842]
    >>> processed_logprobs([row], [0], Sampling(temperature=0)).tolist()
    [0.0]
    """
    rows, _ = truncate_rows(target_logits[: len(token_ids)], sampling)
    return np.array([log_softmax(row, sampling.temperature)[token] for row, token in zip(rows, token_ids)])


def raw_logprobs(target_logits, token_ids):
    """Return log p(y) of each emitted token y, where p = softmax(logits).

    Args:
        target_logits: [rows, vocab] raw logits, a row for each emitted token or more.
        token_ids: [num_tokens] emitted tokens.

    >>> np.exp(raw_logprobs(np.log([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]), [1, 2])).round(6).tolist()
    [0.3, 0.8]
    """
    return processed_logprobs(target_logits, token_ids, Sampling())
