"""`specdecode check` on every method: the distribution of the tokens is the target's, the accepted length is as promised.

Each run verifies 200,000 requests with real noise. Its false-alarm rate is 1e-6, and it sees a total variation of 0.010 to
0.014 of the tokens with probability .999.
"""

import numpy as np
import pytest

from reference import strict
from specdecode.checking import check
from specdecode.checking.cases import CASES
from specdecode.checking.settings import Settings
from specdecode.checking.subjects import load
from tests.conftest import ON_GPU, combine
from tests.support import distributions

BACKENDS = ["eager", *["triton"] * ON_GPU]
SIZES = {"K4-V2": (4, 2), "K3-V3": (3, 3), "K2-V5": (2, 5), "K1-V8": (1, 8)}
METHODS = {
    f"{method}-{'own' if own else 'independent'}-drafts": (method, own)
    for method in ("probabilistic", "block", "strict")
    for own in (True, False)
}
QUESTIONS = {case.name: case for case in CASES if case.name in ("joint", "temperature 0.4", "argmax drafts", "zeros")}


def shared_noise(target, draft):
    return np.array(strict.match_probabilities(list(target), list(draft)))


def accepted_length(method, model, own_drafts, temperature):
    """Return P(so many drafts are accepted)."""
    if method == "block":
        return distributions.accepted_distribution_of_blocks(model, temperature)
    independent = np.minimum if method == "probabilistic" else np.multiply
    accepted_draft = shared_noise if method == "strict" and own_drafts else independent
    return distributions.accepted_distribution(model, accepted_draft, temperature)


def tables(models, argmax):
    """Return the models' rows after every text."""
    states, every_state = np.zeros(1, dtype=int), []
    for following in models.following:
        every_state.append(states)
        states = following[states].ravel()
    target, draft = (
        [rows[states].astype(float) for rows, states in zip(side, every_state)]
        for side in (models.target, models.draft)
    )
    if argmax:
        draft = [np.where(rows == rows.max(axis=1, keepdims=True), 0, -np.inf) for rows in draft]
    return distributions.Tables(target, draft)


@pytest.mark.parametrize(("method", "question", "size"), combine(list(METHODS), list(QUESTIONS), list(SIZES)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_and_accepted_length_have_their_distributions(backend, method, question, size):
    (method, own_drafts), case, accepted = METHODS[method], QUESTIONS[question], []
    subject = load(f"specdecode:{method}:{backend}")
    settings = Settings(*SIZES[size], round(distributions.REQUESTS / case.share), seed=0)

    def verify(target_logits, draft_token_ids, **others):
        token_ids = subject.verify(target_logits, draft_token_ids, **others)
        accepted.append((token_ids != -1).sum(dim=1).cpu().numpy() - 1)
        return token_ids

    report = check(verify, subject.draft if own_drafts else None, **settings._asdict(), only=question)
    assert report.passed, str(report)
    counts = np.bincount(np.concatenate(accepted), minlength=settings.num_draft_tokens + 1)
    assert counts.sum() == distributions.REQUESTS
    argmax = case.how.drafts == "argmax"
    model = tables(settings.models(case), argmax)
    distributions.assert_distribution(
        counts, accepted_length(method, model, own_drafts and not argmax, case.temperature)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_that_share_the_targets_noise_would_change_the_distribution(backend):
    """The mistake that `draft` prevents: strict's drafts, verified by probabilistic."""
    verify, draft = load(f"specdecode:probabilistic:{backend}").verify, load(f"specdecode:strict:{backend}").draft
    assert not check(verify, draft, num_draft_tokens=2, requests=distributions.REQUESTS, only="joint").passed
