"""The kernels' random numbers equal the reference's, also at both ends of their range."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from reference import philox as reference
from specdecode.kernels.arguments import Constant, Int32, Int64, Pointer, Requests
from specdecode.kernels.philox import accept_uniform, exponential, philox4x32, uniform
from specdecode.kernels.request import load_key
from specdecode.kernels.values import RequestIndex
from tests.support.kernels import DEVICE, run_kernel

SEEDS = [0, 2**32 - 1, 2**32, -1, -(2**63)]
POSITIONS = [0, 2**32 - 1, 2**32, 2**63 - 1]
INDICES = [0, 1, 1023, 151_935, 2**31 - 1, -1, -(2**31), 5]


class Numbers(NamedTuple):
    """The random numbers of a test."""

    requests: Requests
    index_ptr: Pointer  # [COUNT] int32
    words_ptr: Pointer  # [requests, 2, COUNT] int64
    uniforms_ptr: Pointer  # [requests, 2, COUNT] float32: at offset and domain, and of accept decisions
    exponentials_ptr: Pointer  # [requests, COUNT] float32
    offset: Int32
    domain: Int32
    count: Int64
    COUNT: Constant


@triton.jit
def draw_kernel(numbers):
    request = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, numbers.COUNT)
    index = tl.load(numbers.index_ptr + places)
    key = load_key(numbers.requests, RequestIndex(request, request, request, 0, 0))
    words = philox4x32(key[0], index, key[1] + numbers.offset, numbers.domain)
    first, second = numbers.count * 2 * request, numbers.count * (2 * request + 1)
    tl.store(numbers.words_ptr + first + places, words[0].to(tl.int64))
    tl.store(numbers.words_ptr + second + places, words[1].to(tl.int64))
    tl.store(numbers.uniforms_ptr + first + places, uniform(key, numbers.offset, index, numbers.domain))
    tl.store(numbers.uniforms_ptr + second + places, accept_uniform(key, numbers.offset))
    drawn = exponential(key, numbers.offset, index, numbers.domain)
    tl.store(numbers.exponentials_ptr + numbers.count * request + places, drawn)


def draw(seeds, positions, index, offset, domain):
    """Return words, uniforms and exponentials of each (seed, position); indices count modulo 2^32."""
    requests, count = len(seeds), len(index)
    integers = [torch.tensor(values, dtype=torch.int64, device=DEVICE) for values in (seeds, positions)]
    words = torch.zeros(requests, 2, count, dtype=torch.int64, device=DEVICE)
    floats = torch.zeros(requests, 3, count, device=DEVICE)
    uniforms, exponentials = floats[:, :2].contiguous(), floats[:, 2].contiguous()
    of_requests = Requests(
        temperature_ptr=None,
        temperature=0,
        seeds_ptr=integers[0],
        SEEDS_BY_REQUEST=False,
        first_seed=0,
        positions_ptr=integers[1],
        row_positions_ptr=None,
        block_domain=0,
        token_domain=0,
    )
    index = torch.tensor(index, dtype=torch.int32, device=DEVICE)
    run_kernel(
        draw_kernel, requests, Numbers(of_requests, index, words, uniforms, exponentials, offset, domain, count, count)
    )
    return words.cpu().numpy(), uniforms.cpu().numpy(), exponentials.cpu().numpy()


@pytest.mark.parametrize("repeats", [1, 128])  # up to 512 indices in a loop, more without
def test_numbers_are_the_references(repeats):
    offset, domain = 3, 4 + (2 << 8)
    pairs = list(itertools.product(SEEDS, POSITIONS))
    seeds, positions = zip(*pairs)
    words, uniforms, exponentials = draw(seeds, positions, INDICES * repeats, offset, domain)
    for i, (seed, position) in enumerate(pairs):
        place, index = (position + offset) % 2**64, np.array(INDICES) % 2**32
        counter = (index, *reference.words(place), domain)
        want = reference.philox4x32(counter, reference.words(seed))[:2]
        assert (words[i].reshape(2, repeats, -1) == np.array(want)[:, None].astype(np.int64)).all()
        numbers = reference.uniform(seed, place, index, domain)
        assert (uniforms[i, 0].reshape(repeats, -1) == numbers).all()
        assert (uniforms[i, 1] == reference.uniform(seed, place, 0, reference.Domain.ACCEPT)).all()
        # From u = 1/64 on, 1 - u is rounded: by 2^-25, which is 2^-19 of u.
        np.testing.assert_allclose(exponentials[i].reshape(repeats, -1), [-np.log1p(-numbers)] * repeats, rtol=2**-19)


def test_numbers_are_precise_near_0_and_never_1():
    """First words of 4 and of 2^32 - 93, found by trying some hundred million indices."""
    near_0, near_1 = (5, 7, 47_940_150), (5, 8, 28_346_415)
    seeds, positions, indices = zip(near_0, near_1)
    words, uniforms, exponentials = draw(seeds, positions, indices, 0, 0)
    assert words[0, :, 0].tolist() == [4, 3_386_221_344]
    assert words[1, 0, 1] == 2**32 - 93
    small = 4 * 2.0**-32 + 3_386_221_344 * 2.0**-64
    np.testing.assert_allclose([uniforms[0, 0, 0], exponentials[0, 0]], [small, -np.log1p(-small)], rtol=2**-22)
    assert uniforms[1, 0, 1] == 1 - 2**-24
    np.testing.assert_allclose(exponentials[1, 1], 24 * np.log(2), rtol=1e-6)
