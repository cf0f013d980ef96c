"""Verifiers as readers of the course write them, one request at a time: each has one mistake, and the name it should get."""

import numpy as np


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=float)
    return weights / weights.sum(axis=-1, keepdims=True)


def residual(p, q):
    weights = np.maximum(0, p - q)
    return weights / weights.sum()


def first_rows(rows):
    return np.repeat(rows[:1], len(rows), axis=0)


MISTAKES = {
    "none": None,
    "the comparison the wrong way round": "accept_complement",
    "drafts[:i + 1]": "rejected_draft_kept",
    "row 0's p for all rows": "first_target_row_for_all",
    "row 0's p for all drafts": "first_target_row_for_all",
    "row 0 of both": "first_target_row_for_all",
    "argmax in place of a draw": "last_token_argmax",
    "argmax of p": "last_token_argmax",
    "drawn from q": "recovered_from_draft",
    "weights not divided by their sum": "recovered_not_normalised",
    "weights + 1e-3": "recovered_with_a_constant",
    "temperature on the target alone": "temperature_for_target_alone",
    "forgotten return": "no_return",
    "NaN": "nan_probabilities",
    "negative weights": "negative_probabilities",
}


def reader(mistake, seed=0):
    """Return a verifier with a mistake."""
    random = np.random.default_rng(seed)

    def draw(weights):
        return weights.argmax() if mistake == "argmax in place of a draw" else random.choice(len(weights), p=weights)

    def recovered(p, q):
        if mistake == "drawn from q":
            return draw(q)
        if mistake == "argmax of p":
            return p.argmax()
        if mistake == "NaN":
            return draw(residual(q, q))
        if mistake == "negative weights":
            return draw(p - q + 1 / len(p))
        if mistake == "weights not divided by their sum":
            return (np.maximum(0, p - q).cumsum() > random.random()).argmax()
        if mistake == "weights + 1e-3":
            weights = np.maximum(0, p - q) + 1e-3
            return draw(weights / weights.sum())
        return draw(residual(p, q))

    def one_step(p, q, drafts):
        for i, x in enumerate(drafts):
            u, ratio = random.random(), p[i, x] / q[i, x]
            if u < ratio if mistake == "the comparison the wrong way round" else u > ratio:
                return [*drafts[: i + (mistake == "drafts[:i + 1]")], recovered(p[i], q[i])]
        return [*drafts, p[-1].argmax() if mistake == "argmax of p" else draw(p[-1])]

    def forgetful(p, q, drafts):
        one_step(p, q, drafts)

    def verify(target_logits, draft_token_ids, draft_logits, temperature=1.0):
        output = np.full((len(target_logits), target_logits.shape[1]), -1)
        ps = softmax(target_logits / temperature)
        qs = softmax(draft_logits / (1.0 if mistake == "temperature on the target alone" else temperature))
        for r, (p, q, drafts) in enumerate(zip(ps, qs, draft_token_ids)):
            if mistake in ("row 0's p for all rows", "row 0 of both"):
                p = first_rows(p)
            if mistake == "row 0's p for all drafts":
                p = np.concatenate([first_rows(p[:-1]), p[-1:]])
            tokens = (forgetful if mistake == "forgotten return" else one_step)(
                p, first_rows(q) if mistake == "row 0 of both" else q, drafts
            )
            output[r, : len(tokens)] = tokens
        return output

    if "temperature" in str(mistake):
        return verify
    return lambda target_logits, draft_token_ids, draft_logits: verify(target_logits, draft_token_ids, draft_logits)


def seeded(key, recovered_at):
    """Return a verifier whose numbers depend on `key(seed, position)`; `recovered_at(i, K)` is the last token's position."""

    def draw(weights, u):
        sums = weights.cumsum()
        return (sums > u * sums[-1]).argmax()

    def one_step(p, q, drafts, seed, position):
        uniform = lambda i: np.random.default_rng(key(seed, position + i)).random(2)  # noqa: E731
        for i, x in enumerate(drafts):
            if uniform(i)[0] * q[i, x] >= p[i, x]:
                at, use = recovered_at(i, len(drafts))
                return [*drafts[:i], draw(np.maximum(0, p[i] - q[i]), uniform(at)[use])]
        return [*drafts, draw(p[-1], uniform(len(drafts))[1])]

    def verify(target_logits, draft_token_ids, draft_logits, *, seeds, positions):
        output = np.full((len(target_logits), target_logits.shape[1]), -1)
        for r, (p, q) in enumerate(zip(softmax(target_logits), softmax(draft_logits))):
            tokens = one_step(p, q, draft_token_ids[r][draft_token_ids[r] >= 0], seeds[r], positions[r])
            output[r, : len(tokens)] = tokens
        return output

    return verify
