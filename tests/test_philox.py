"""The noise contract: Philox4x32-10 as its authors publish it, the counter's layout, and numbers that are independent.

Statistical tests use 65,536 numbers; each would reject a right generator once in a million runs. Their seeds are fixed,
so every run has the same result. With 63 degrees of freedom, such a test finds an error of total variation 0.023 in 999
of 1,000 runs (4 TV^2 N = 142).
"""

import math
from collections.abc import Callable
from itertools import combinations
from unittest import mock

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from reference import philox as reference
from reference import selection
from specdecode import noise
from specdecode.arguments import MOST_DRAFT_TOKENS
from specdecode.eager import philox as eager
from tests.support.distributions import FALSE_ALARM
from tests.support.mutants import Mutant, assert_caught
from tests.support.philox import EXTREMES, ONES, counter_of

KNOWN_ANSWERS = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
"""philox4x32 with 10 rounds, from the kat_vectors of Random123: counter, key, output."""

SEEDS = [0, 1, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**32), -(2**63)]
POSITIONS = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
INDICES = [0, 1, 1023, 1024, 151_935, 2**31 - 1, 2**31, 2**32 - 1]
DOMAINS = list(reference.Domain)


def eager_words(counter: tuple, key: tuple, device: str) -> tuple[int, ...]:
    counter, key = (tuple(torch.tensor([word], device=device) for word in words) for words in (counter, key))
    return tuple(int(word) for word in eager.philox4x32(counter, key))


def check_known_answer(name: str) -> None:
    counter, key, output = KNOWN_ANSWERS[name]
    assert tuple(int(word) for word in reference.philox4x32(counter, key)) == output


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_the_reference_gives_the_published_answers(name):
    check_known_answer(name)


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_eager_gives_the_published_answers(place, name):
    counter, key, output = KNOWN_ANSWERS[name]
    assert eager_words(counter, key, place[1]) == output


# --- The layout of the counter, and the number made of two words --------------------------------------------------------


def spelled_out(seed: int, position: int, index: int, domain: int) -> float:
    """The contract with plain integers: key = seed, counter = (index, position low, position high, domain).

    Each of the first two words is rounded to float32, scaled and added; the sum is clipped to exclude 0 and 1.
    """
    seed, position = seed % 2**64, position % 2**64
    a, b, c, d, key = index, position % 2**32, position >> 32, domain, (seed % 2**32, seed >> 32)
    for number in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        k0, k1 = ((key[i] + number * step) % 2**32 for i, step in enumerate((0x9E3779B9, 0xBB67AE85)))
        a, b, c, d = (right >> 32) ^ b ^ k0, right % 2**32, (left >> 32) ^ d ^ k1, left % 2**32
    high, low = (float(np.float32(word)) for word in (a, b))
    return min(max(float(np.float32(high * 2.0**-32 + low * 2.0**-64)), 2.0**-65), 1 - 2.0**-24)


def check_layout() -> None:
    """Every bit of the seed, position, index and domain is used at its own place."""
    for domain in DOMAINS:
        for seed in SEEDS:
            for position in POSITIONS:
                expected = [spelled_out(seed, position, index, domain) for index in INDICES]
                assert reference.uniform(seed, position, np.array(INDICES), domain).tolist() == expected


def test_uniforms_are_laid_out_as_the_contract_says():
    check_layout()


@pytest.mark.parametrize("domain", DOMAINS)
def test_eager_uniforms_equal_the_references_bit_for_bit(place, domain):
    _, device = place
    random = np.random.default_rng(int(domain))
    seeds = np.concatenate([SEEDS, random.integers(-(2**63), 2**63 - 1, size=200, endpoint=True)])
    positions = np.concatenate(
        [POSITIONS, random.integers(0, 2**63 - 1, size=len(seeds) - len(POSITIONS), endpoint=True)]
    )
    indices = np.concatenate([INDICES, random.integers(0, 2**32, size=100)])
    expected = np.stack(
        [reference.uniform(int(seed), int(position), indices, domain) for seed, position in zip(seeds, positions)]
    )
    seeds, positions, indices = (torch.tensor(numbers, device=device) for numbers in (seeds, positions, indices))
    got = eager.uniform(seeds[:, None], positions[:, None], indices, noise.Domain(domain))
    assert got.dtype == torch.float32
    assert np.array_equal(got.double().cpu().numpy(), expected)


def test_eager_exponentials_make_the_references_gumbels(place):
    # Both compute the same formula in float64; logarithms may differ in the last bits.
    _, device = place
    seeds, positions, indices = torch.tensor([[3]]), torch.tensor([[2**40]]), torch.arange(100_000)
    numbers = (tensor.to(device) for tensor in (seeds, positions, indices))
    got = -eager.exponential(*numbers, noise.Domain.DRAFT_TOKEN).log()
    expected = reference.gumbel(3, 2**40, indices.numpy(), reference.Domain.DRAFT_TOKEN)
    assert np.allclose(got[0].cpu().numpy(), expected, rtol=1e-12, atol=1e-12)


def test_domains_are_distinct_and_equal_on_both_floors():
    assert {domain.name: int(domain) for domain in noise.Domain} == {
        domain.name: int(domain) for domain in reference.Domain
    }
    assert len({int(domain) for domain in reference.Domain}) == len(reference.Domain.__members__) == 5
    assert (reference.SELECT, reference.DRAFT, selection.BLOCK_SIZE) == (noise.SELECT, noise.DRAFT, noise.BLOCK_SIZE)
    assert not {*noise.SELECT, noise.Domain.ACCEPT} & {*noise.DRAFT}


def test_every_draft_of_a_step_has_domains_of_its_own():
    # Two drafts that shared a domain would share numbers wherever a step's positions overlap an earlier step's.
    steps = [noise.draft_domains(offset) for offset in range(MOST_DRAFT_TOKENS)]
    assert steps[0] == noise.DRAFT
    others = [noise.Domain.ACCEPT, *noise.SELECT]
    domains = [*others, *(domain for step in steps for domain in step)]
    assert len(set(domains)) == len(domains) == len(others) + 2 * MOST_DRAFT_TOKENS
    assert all(0 <= domain < 2**32 for domain in domains)  # a word of the counter


# --- Both ends ----------------------------------------------------------------------------------------------------------


def made_of(words: tuple[int, int], make: Callable) -> float:
    """Return the number that `make` computes from a pair of words."""
    with mock.patch.object(reference, "philox4x32", return_value=(*map(np.uint64, words), None, None)):
        return float(make(0, 0, 0, reference.Domain.ACCEPT))


def check_ends() -> None:
    """No words give 0 or 1, and Gumbel numbers are finite."""
    numbers = [made_of(words, reference.uniform) for words in EXTREMES]
    assert all(0 < number < 1 for number in numbers)
    assert (min(numbers), max(numbers)) == (2.0**-65, 1 - 2.0**-24)
    assert all(math.isfinite(made_of(words, reference.gumbel)) for words in EXTREMES)


def test_no_words_make_0_or_1():
    check_ends()


@pytest.mark.parametrize("words", EXTREMES)
def test_no_words_make_0_or_1_in_eager(place, words):
    *counter, domain = counter_of(words)
    index, position, seed = (torch.tensor([number], device=place[1]) for number in (*counter, 0))
    assert float(eager.uniform(seed, position, index, domain)) == made_of(words, reference.uniform)
    exponential = float(eager.exponential(seed, position, index, domain))
    assert -math.log(exponential) == pytest.approx(made_of(words, reference.gumbel), rel=1e-14)


def test_small_numbers_keep_their_precision():
    # A token 40 nats below another can be drawn because u near 2^-60 is not rounded to a multiple of 2^-24 or 2^-32.
    assert made_of((0, 3), reference.uniform) == 3 * 2.0**-64
    assert made_of((1, 2**31), reference.uniform) == 2.0**-32 + 2.0**-33


# --- Uniform and independent --------------------------------------------------------------------------------------------

COUNT = 2**16
INDEX = np.arange(COUNT)


def numbers(seed: int = 5, position: int = 3, shift: int = 0, domain: int = 0) -> np.ndarray:
    return reference.uniform(seed, position, INDEX + shift, domain)


def over_positions(seed: int = 5, shift: int = 0, domain: int = 0) -> np.ndarray:
    """Return one number for each of many positions, as for accept decisions."""
    return np.array([float(reference.uniform(seed, shift + i, 0, domain)) for i in range(COUNT // 8)])


def assert_uniform(cells: np.ndarray, num_cells: int = 64) -> None:
    observed, expected = np.bincount(cells, minlength=num_cells), len(cells) / num_cells
    assert chi2.sf(((observed - expected) ** 2 / expected).sum(), num_cells - 1) > FALSE_ALARM


def assert_independent(one: np.ndarray, other: np.ndarray) -> None:
    """Check that pairs are uniform over 8 x 8 cells."""
    assert_uniform((8 * one).astype(int) * 8 + (8 * other).astype(int))


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("position", [0, 2**32, 2**63 - 1])
def test_numbers_are_uniform_over_indices(domain, position):
    uniforms = numbers(position=position, domain=domain)
    assert_uniform((64 * uniforms).astype(int))
    # Also the bits below the first six, which decide between two close thresholds.
    assert_uniform((64 * (2**12 * uniforms % 1)).astype(int))


def test_numbers_are_uniform_over_positions_and_seeds():
    # 8,192 numbers: sees a total variation of 0.066.
    assert_uniform((64 * over_positions()).astype(int))
    seeds = np.array([float(reference.uniform(seed, 0, 0, reference.Domain.ACCEPT)) for seed in range(COUNT // 8)])
    assert_uniform((64 * seeds).astype(int))
    assert_independent(over_positions(), over_positions(shift=1))


def check_neighbours() -> None:
    """Check that numbers are independent if one input differs, by 1 or in the high word."""
    for change in [
        {"seed": 6},
        {"seed": 5 + 2**32},
        {"seed": 5 - 2**63},
        {"position": 4},
        {"position": 3 + 2**32},
        {"shift": 1},
        {"shift": 1024},
    ]:
        assert_independent(numbers(), numbers(**change))
    for one, other in combinations(DOMAINS, 2):
        assert_independent(numbers(domain=one), numbers(domain=other))


def test_numbers_that_differ_in_one_thing_are_independent():
    check_neighbours()


# --- Mutants ------------------------------------------------------------------------------------------------------------


def known_answers() -> None:
    for name in KNOWN_ANSWERS:
        check_known_answer(name)


MUTANTS = [
    Mutant("nine rounds", reference.philox4x32, "rounds: int = 10", "rounds: int = 9", known_answers),
    Mutant("key words swapped", reference.philox4x32, "k0, k1 = (np.uint64", "k1, k0 = (np.uint64", known_answers),
    Mutant("key not advanced", reference.philox4x32, "k1 = (k1 + np.uint64(KEY_INCREMENTS[1]))", "k1 = (k1)", known_answers),
    Mutant("multipliers swapped", reference.philox4x32, "multiply(MULTIPLIERS[0], c0)", "multiply(MULTIPLIERS[1], c0)",
           known_answers),
    Mutant("output words crossed", reference.philox4x32, "high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0",
           "high0 ^ c1 ^ k0, low0, high1 ^ c3 ^ k1, low1", known_answers),
    Mutant("key words swapped", reference.words, "return int(value) & MASK, (int(value) >> 32) & MASK",
           "return (int(value) >> 32) & MASK, int(value) & MASK", check_layout),
    Mutant("seed's high word dropped", reference.uniform, "key=words(seed)", "key=(words(seed)[0], 0)", check_layout),
    Mutant("position's high word dropped", reference.uniform, "*words(position)", "words(position)[0], 0", check_layout),
    Mutant("position's high word dropped, as neighbours see it", reference.uniform, "*words(position)",
           "words(position)[0], 0", check_neighbours),
    Mutant("domain dropped", reference.uniform, "int(domain))", "0)", check_neighbours),
    Mutant("domain added to the index", reference.uniform, "(index, *words(position), int(domain))",
           "(index + int(domain), *words(position), 0)", check_layout),
    Mutant("position dropped", reference.uniform, "*words(position)", "0, 0", check_neighbours),
    Mutant("words crossed in the number", reference.uniform, "high, low, _, _ =", "low, high, _, _ =", check_layout),
    Mutant("32 bits only", reference.uniform, " + low.astype(np.float32) * np.float32(2**-64)", "", check_layout),
    Mutant("0 let through", reference.uniform, "np.clip(number, np.float32(2**-65)", "np.clip(number, np.float32(0)",
           check_ends),
    Mutant("1 let through", reference.uniform, "np.float32(1 - 2**-24)", "np.float32(1)", check_ends),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_caught(mutant):
    assert_caught(mutant)
