"""Two-level selection of a token: ties, small weights, and a wrongly guessed block."""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from scipy.stats import poisson

from reference.sampling import sample as sample_row
from specdecode import RejectionSampler, sample
from specdecode.kernels import selection as kernel_selection
from specdecode.kernels.arguments import Constant, Pointer
from specdecode.kernels.selection import first_largest, select_block, select_token, token_weights
from tests.conftest import ON_GPU
from tests.support import distributions
from tests.support.differential import case
from tests.support.kernels import DEVICE, needs_gpu, needs_interpreter, run_kernel


class Scores(NamedTuple):
    """The inputs and results of selection."""

    logits_ptr: Pointer  # [SIZE] float32
    exponentials_ptr: Pointer  # [SIZE] float32
    row_max_ptr: Pointer  # [1] float32
    temperature_ptr: Pointer  # [1] float32
    selected_ptr: Pointer  # [3] int32: the first largest logit, the block by weights, the token of block 5
    SIZE: Constant


@triton.jit
def select_kernel(scores):
    places = tl.arange(0, scores.SIZE)
    logits = tl.load(scores.logits_ptr + places)
    exponentials = tl.load(scores.exponentials_ptr + places)
    row_max, temperature = tl.load(scores.row_max_ptr), tl.load(scores.temperature_ptr)
    weights = tl.exp((logits - row_max) / temperature)
    tl.store(scores.selected_ptr, first_largest(weights))
    tl.store(scores.selected_ptr + 1, select_block(weights, exponentials))
    weights = token_weights(logits, row_max, temperature)
    tl.store(scores.selected_ptr + 2, select_token(weights, exponentials, tl.full([], 5, tl.int32)))


def select(logits, exponentials, row_max, temperature=1.0) -> list[int]:
    size = len(logits)
    numbers = [torch.tensor(values, device=DEVICE) for values in (logits, exponentials, [row_max], [temperature])]
    selected = torch.full((3,), -1, dtype=torch.int32, device=DEVICE)
    run_kernel(select_kernel, 1, Scores(*numbers, selected, size))
    return selected.tolist()


def test_of_equal_scores_the_first_is_selected():
    logits = [-1.0, 2.0, 2.0, 0.0, 2.0, 2.0, 1.0, 2.0]
    assert select(logits, [1.0] * 8, 2.0) == [1, 1, 5 * 1024 + 1]


def test_no_weight_that_can_win_underflows():
    """A token with e^-98 of its row can be selected: its block has e^-49, and the token e^-49 of its block.

    Exponential numbers are at least 2^-65, which is e^-45, and at most 45: e^3.8.
    """
    logits, least = [-torch.inf, -98.0, -98.001, -50.0], 2.0**-65
    assert select(logits, [least, 1.0005 * least, least, 44.0], 0.0)[2] == 5 * 1024 + 1
    assert select(logits, [least, least, least / 1.0005, 44.0], 0.0)[2] == 5 * 1024 + 1
    assert select([*logits[:3], -100.0], [least, least, least / 1.005, 1e-12], 0.0)[1:] == [2, 5 * 1024 + 2]


def test_a_block_with_the_smallest_sum_can_be_selected():
    """Even with the largest exponential number, its score does not round to 0, the score of impossible blocks."""
    smallest = -87.0 if ON_GPU else -103.0  # a GPU rounds denormal numbers to 0
    assert select([-torch.inf, smallest, -torch.inf, -torch.inf], [1e-19, 44.0, 1e-19, 1e-19], 0.0)[1] == 1


def drawn(logits: torch.Tensor, temperature: float, seeds: torch.Tensor) -> list[int]:
    sampler = RejectionSampler("strict", backend="triton")
    return sampler.draft(logits.to(DEVICE), temperature, seeds.to(DEVICE)).token_ids.tolist()


def test_sampled_tokens_are_the_references():
    """Some seeds select a block when another block is nearly as likely."""
    requests = 200 if ON_GPU else 12
    logits = case(requests, 0, 5000, torch.float32, seed=5).target_logits[:, 0]
    seeds = torch.arange(requests) * 977
    chosen = [sample_row(row.double().numpy(), temperature=0.7, seed=int(seed)) for row, seed in zip(logits, seeds)]
    wrong = [choice.margin for token, choice in zip(drawn(logits, 0.7, seeds), chosen) if token != choice.index]
    assert all(margin < 1e-4 for margin in wrong)
    assert len(wrong) <= 1


@needs_interpreter
@pytest.mark.parametrize("guess", [0, 3])
def test_a_wrong_guess_of_the_block_changes_nothing(guess, monkeypatch):
    logits = case(6, 0, 5000, torch.float32, greedy=0, seed=6).target_logits[:, 0]
    seeds = torch.arange(6)
    usual = drawn(logits, 0.7, seeds)
    assert len({token // 1024 for token in usual}) > 2
    monkeypatch.setattr(kernel_selection, "guess_block", lambda *_: tl.full([], guess, tl.int32))
    assert drawn(logits, 0.7, seeds) == usual


@needs_interpreter
def test_the_block_is_nearly_always_guessed(monkeypatch):
    """Otherwise the logits of the block are loaded twice."""
    guesses: list[int] = []

    def noting(function):
        def call(*arguments):
            block = function(*arguments)
            guesses.append(int(block))
            return block

        return call

    for name in ("guess_block", "select_block"):
        monkeypatch.setattr(kernel_selection, name, noting(getattr(kernel_selection, name)))
    drawn(case(20, 0, 9000, torch.float32, greedy=0, seed=7).target_logits[:, 0], 0.7, torch.arange(20))
    assert len(guesses) == 40
    assert sum(guessed == block for guessed, block in zip(guesses[::2], guesses[1::2])) >= 19


@needs_gpu
def test_rare_tokens_are_drawn_as_often_as_they_should():
    # 262,144 tokens 20.5 nats below one token: 32.8 hits in 100,000 draws, two-sided Poisson bounds at 1e-6.
    logits = torch.full((262_145,), -20.5, device="cuda").index_fill_(0, torch.tensor(77, device="cuda"), 0)
    tokens = torch.cat([sample(logits.expand(1000, -1), seeds=seed) for seed in range(0, 100_000, 1000)])
    hits = tokens[tokens != 77]
    low, high = poisson.ppf([distributions.FALSE_ALARM / 2, 1 - distributions.FALSE_ALARM / 2], 32.8)
    assert low <= len(hits) <= high
    assert len(hits.unique()) >= len(hits) - 1
