"""Temperature 0: every token is the argmax of its row, and of equal logits the one with the lowest id.

There is one right answer, so nothing is counted: each emitted token is compared. What helps is many texts. Each request has
rows of its own, drawn from the seed, and drafts that are right up to a place that goes round from 0 to K.
"""

import numpy as np

from specdecode.checking.cases import GREEDY
from specdecode.checking.findings import Finding
from specdecode.checking.models import SPREAD
from specdecode.checking.runs import MAX_LOGITS, fresh
from specdecode.checking.settings import Settings
from specdecode.checking.subject import Arguments, Ids, Subject, array_text, given_drafts

TEXTS = 400
"""Requests, each with a text of its own."""

GRID = 1 / 8
"""Logits differ by multiples of it and none is 0. bfloat16 holds them: none become equal by rounding."""

ROLES = ("first drafts", "later drafts", "first recovered tokens", "later recovered tokens", "bonus tokens")
BONUS, EQUAL, DIVIDED = len(ROLES) - 1, len(ROLES) + 1, len(ROLES) + 2


def make_texts(subject: Subject, settings: Settings) -> Arguments:
    """Return rows and drafts. Of request r the first r % (K + 1) drafts are right, the next is not, later ones may be."""
    random, num_drafts, vocab = settings.random(GREEDY), settings.num_draft_tokens, settings.vocab_size
    requests = max(num_drafts + 1, min(TEXTS, MAX_LOGITS // ((num_drafts + 1) * vocab)))
    rows = GRID * (np.round(SPREAD / GRID * random.normal(size=(requests, num_drafts + 1, vocab))) + 0.5)
    equal = random.random(rows.shape[:2]) < 0.3
    other = (rows.argmax(axis=2) + random.integers(1, vocab, size=equal.shape)) % vocab
    rows[equal, other[equal]] = rows.max(axis=2)[equal]
    best = rows.argmax(axis=2)
    second = np.where(best[..., None] == np.arange(vocab), -np.inf, rows).argmax(axis=2)
    right, place = np.arange(requests)[:, None] % (num_drafts + 1), np.arange(num_drafts)
    agrees = (place < right) | ((place > right) & (random.random((requests, num_drafts)) < 0.5))
    drafts = np.where(agrees, best[:, :-1], second[:, :-1])
    sharpness = random.choice([0.1, 1.0], size=(requests, 1, 1))  # so that p > q of a wrong draft, too
    others = sharpness * (0.5 * rows[:, :-1] + random.normal(size=(requests, num_drafts, vocab)))
    np.put_along_axis(others, drafts[..., None], others.max(axis=2, keepdims=True) + GRID, axis=2)
    rows += random.choice([-8, 0, 8], size=(requests, num_drafts + 1, 1))
    logits = others.astype(np.float32)
    seeds, positions = fresh(requests, random)
    if subject.draft is not None:
        for i in range(num_drafts):
            options = {"temperature": 0.0, "seeds": seeds, "positions": positions + i}
            drafts[:, i] = subject.call_draft(logits[:, i], i, options)
        drafts[place >= given_drafts(drafts)[:, None]] = -1
    return Arguments(rows.astype(np.float32), drafts, logits, 0.0, seeds, positions)


def compared(subject: Subject, arguments: Arguments, tokens: Ids) -> Finding:
    """Compare every token with the argmax."""
    best, emitted, role = arguments.target_logits.argmax(axis=2), tokens != -1, roles(arguments, tokens)
    wrong = emitted & (tokens != best)
    possible = np.cumprod(arguments.draft_token_ids == best[:, :-1], axis=1).sum(axis=1).mean()
    what = f"every token is the argmax; {emitted.sum(axis=1).mean() - 1:.3f} accepted drafts a step, {possible:.3f} possible"
    if not wrong.any():
        return Finding(GREEDY, None, what, certain=True)
    kinds = [
        f"{wrong[role == i].sum()} of {(role == i).sum()} {name}"
        for i, name in enumerate(ROLES)
        if wrong[role == i].any()
    ]
    request, place = np.argwhere(wrong)[0]
    row, token = arguments.target_logits[request, place], tokens[request, place]
    tie = ", the lowest id of equal logits" if row[token] == row.max() else ""
    seen = f"token {place + 1} of {tokens[request].tolist()}: expected {best[request, place]}{tie}; logits {array_text(row)}"
    call = f"request {request} of the {len(tokens)} of its call; alone it may be right:\n"
    call += subject.call_text(arguments, int(request))
    return Finding(GREEDY, None, what, f"wrong: {', '.join(kinds)}\n{seen}\n{call}", passed=False, certain=True)


def roles(arguments: Arguments, tokens: Ids) -> Ids:
    """Return the role of each token, [n, K + 1]; -1 after the last."""
    place, accepted = np.arange(tokens.shape[1]), (tokens != -1).sum(axis=1, keepdims=True) - 1
    bonus = accepted == given_drafts(arguments.draft_token_ids)[:, None]
    last = np.where(bonus, BONUS, 2 + (place > 0))
    return np.where(place < accepted, place > 0, np.where(place == accepted, last, -1))


def errors(arguments: Arguments, tokens: Ids) -> Ids:
    """Number the first error of each request by its role, from 1; 0 is none.

    All errors have one number if equal logits explain each of them, or if last tokens look like logits divided by 0:
    token 0 if all become NaN, or the first positive one if all positive ones become infinite.
    """
    rows, requests, last = arguments.target_logits, np.arange(len(tokens)), (tokens != -1).sum(axis=1) - 1
    wrong = (tokens != -1) & (tokens != rows.argmax(axis=2))
    first = wrong.argmax(axis=1)
    found = np.where(wrong.any(axis=1), 1 + roles(arguments, tokens)[requests, first], 0)
    equal = rows[requests, first, tokens[requests, first]] == rows[requests, first].max(axis=1)
    token, positive = tokens[requests, last], (rows[requests, last] > 0).argmax(axis=1)
    if ((token == 0) | (token == positive)).all():
        return np.where(found > 0, DIVIDED, 0)
    return np.where(found > 0, EQUAL, 0) if equal[found > 0].all() else found
