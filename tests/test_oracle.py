"""The oracle, on logits and seeds, agrees with the reference's modules, on probabilities and random numbers."""

import numpy as np
import pytest

from reference import block, greedy, oracle, probabilistic, selection, strict, synthetic, truncation
from reference.philox import SELECT, Domain, gumbel, uniform
from reference.sampling import Sampling, select
from tests.support.mutants import Mutant, assert_caught

RATES = [0.9, 0.6, 0.8]


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()


def by_the_modules(method: str, target, drafts: list[int], draft, seed: int, position: int) -> list[int]:
    """Return the tokens of a step, given distributions; `draft` is None for a deterministic drafter."""
    vocab_size, offsets = len(target[0]), range(len(drafts))
    uniforms = [float(uniform(seed, position + i, i if method == "block" else 0, Domain.ACCEPT)) for i in offsets]
    if method == "synthetic":
        accepted, probs = synthetic.verify(target, draft, RATES, uniforms)
    else:
        q = np.eye(vocab_size)[drafts] if draft is None else draft
        accepted, probs = {"probabilistic": probabilistic, "block": block}[method].verify(target, q, drafts, uniforms)
    return [*drafts[:accepted], drawn(probs, seed, position + accepted)]


def drawn(probs: np.ndarray, seed: int, position: int) -> int:
    """Return a token drawn from a distribution, with the noise of its position."""
    num_blocks = -(-len(probs) // selection.BLOCK_SIZE)
    noise = [gumbel(seed, position, np.arange(n), domain) for n, domain in zip((num_blocks, len(probs)), SELECT)]
    with np.errstate(divide="ignore"):
        return selection.select(np.log(probs), *noise)


def check_methods(requests: int = 60) -> None:
    """Random requests, a third of them truncated, a quarter greedy; in a third the draft is deterministic."""
    random, compared, accepted = np.random.default_rng(0), 0, 0
    for seed in range(requests):
        vocab_size, length = int(random.choice([2, 5, 40, 1030])), int(random.integers(4))
        target = 2 * random.normal(size=(length + 1, vocab_size))
        draft = target[:length] + random.normal(size=(length, vocab_size))
        temperature = float(random.uniform(0.5, 1.5)) if random.random() < 0.75 else 0.0
        options = {"top_k": int(random.integers(1, 30)), "top_p": 0.9, "min_p": 0.01} if random.random() < 0.3 else {}
        draft_sampling = Sampling(float(random.uniform(0.5, 1.5)), top_p=0.8)
        if temperature > 0:
            p = [truncation.truncate(softmax(row, temperature), **options) for row in target]
        q = [truncation.truncate(softmax(row, draft_sampling.temperature), top_p=0.8) for row in draft]
        ids = [int(random.choice(vocab_size, p=row)) for row in q]
        for method in ("strict", "probabilistic", "block", "synthetic"):
            is_certain = random.random() < 0.3
            found = oracle.verify(
                method,
                target,
                [*ids, -1, 0],
                None if is_certain else draft,
                temperature=temperature,
                **options,
                draft_sampling=draft_sampling,
                seed=seed,
                position=7,
                conditional_rates=RATES,
            )
            if found.margin < 1e-9:
                continue
            if method == "strict" and temperature > 0:
                expected = greedy.compare([drawn(row, seed, 7 + i) for i, row in enumerate(p)], ids)
            elif method == "synthetic" and temperature == 0:
                p_greedy = np.eye(vocab_size)[target.argmax(axis=1)]
                expected = by_the_modules(method, p_greedy, ids, None, seed, 7)
            elif temperature == 0:
                expected = greedy.verify(target, ids)
            else:
                expected = by_the_modules(method, p, ids, None if is_certain else q, seed, 7)
            assert found.token_ids == expected, (seed, method)
            compared += 1
            accepted += found.num_accepted
    assert compared > 3.9 * requests
    assert accepted > requests


def test_the_oracle_emits_what_the_modules_emit():
    check_methods(400)


def test_strict_compares_with_samples_by_one_gumbel_max_where_there_is_one_block():
    # With a single block, the block's random number does not matter.
    random = np.random.default_rng(0)
    for seed in range(50):
        rows = np.log(random.dirichlet(np.ones(6), size=3))
        noise = [gumbel(seed, position, np.arange(6), Domain.SELECT_TOKEN) for position in range(3)]
        ids = [int(select(row, seed, position).index) for position, row in enumerate(rows)]
        ids[1] = (ids[1] + seed % 2) % 6
        assert strict.verify(rows, ids[:2], noise) == oracle.verify("strict", rows, ids[:2], seed=seed).token_ids


MUTANTS = [
    Mutant("index of the accept number", oracle.verify_block, "index=i - 1", "index=i", check_methods),
    Mutant("position of the accept number", oracle.Request.log_uniform, "self.position + offset",
           "self.position + offset + 1",
           check_methods),
    Mutant("position of the token", oracle.Request.draw, "self.position + offset", "self.position + offset + 1",
           check_methods),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_caught(mutant):
    assert_caught(mutant)
