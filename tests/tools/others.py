"""Verifiers of other packages, called as `specdecode check` calls one: `specdecode check tests/tools/others.py:flashspec`.

The packages are not needed by any test. Install the one that you want to check: flashspec, rotalabs-accel. Cases that a
package does not handle, such as greedy decoding, raise a ValueError and are skipped.
"""

import numpy as np
import torch

from specdecode.checking.subject import given_drafts


def log_probs(logits: np.ndarray, temperature: float) -> torch.Tensor:
    return torch.log_softmax(torch.from_numpy(logits) / temperature, dim=-1)


def padded(tokens: np.ndarray, accepted: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return accepted drafts, the next token, then -1."""
    slots, count = np.arange(tokens.shape[1] + 1), accepted[:, None]
    return np.where(slots < count, np.pad(tokens, ((0, 0), (0, 1))), np.where(slots == count, last[:, None], -1))


def flashspec(target_logits, draft_token_ids, draft_logits, *, temperature):
    """Verify by `rejection_step`, or by `rejection_step_onehot` for drafts without logits."""
    from flashspec.sampling.rejection import rejection_step, rejection_step_onehot

    if temperature == 0 or draft_token_ids.shape[1] == 0:
        raise ValueError("greedy decoding, and steps without drafts, are elsewhere in the package")
    target, tokens = log_probs(target_logits, temperature), torch.from_numpy(draft_token_ids)
    if draft_logits is None:
        lengths = torch.from_numpy(given_drafts(draft_token_ids))
        result = rejection_step_onehot(tokens.clamp(min=0), target, lengths)
    elif (draft_token_ids < 0).any():
        raise ValueError("drafts with logits are as many in each request")
    else:
        result = rejection_step(tokens, log_probs(draft_logits, temperature), target)
    return padded(draft_token_ids, *result.numpy().T)


def rotalabs_accel(target_logits, draft_token_ids, draft_logits, *, temperature):
    """Verify by `rejection_sample`, in a loop that stops at the first rejection, as documented; bonus token from p."""
    from rotalabs_accel.speculative.sampling import rejection_sample

    if temperature == 0 or draft_logits is None or (draft_token_ids < 0).any():
        raise ValueError("its arguments are one drawn draft and the probability that it was drawn with")
    target, draft = torch.from_numpy(target_logits) / temperature, log_probs(draft_logits, temperature).exp()
    probs, tokens = torch.softmax(target, dim=-1), torch.from_numpy(draft_token_ids)
    output = np.full((len(tokens), tokens.shape[1] + 1), -1)
    for request, drafts in enumerate(tokens):
        for offset, token in enumerate(drafts):
            p, q = probs[request, offset, token], draft[request, offset, token]
            accepted, emitted = rejection_sample(p, q, token, target[request, offset], use_sampling=True)
            output[request, offset] = int(emitted)
            if not accepted:
                break
        else:
            output[request, -1] = int(torch.multinomial(probs[request, -1], 1))
    return output
