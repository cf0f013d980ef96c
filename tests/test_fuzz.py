"""Valid calls with hostile values return the reference's tokens, except where rounding decides."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.philox import DRAFT, SELECT
from reference.sampling import sample as sample_row
from specdecode import sample
from tests.support.calls import METHODS
from tests.support.differential import like_a_device
from tests.support.hostile import (
    Request,
    attempt,
    compare_all,
    hostile,
    laid_out,
    make_call,
    make_row_call,
    make_sampler,
    random_of,
    structures,
    with_logsumexp,
)


@pytest.mark.parametrize("method", METHODS)
def test_hostile_values_give_the_tokens_of_the_reference(place, method):
    outcomes = []

    @hostile
    @given(structures, st.booleans())
    def run(structure, masked):
        random = random_of(structure)
        sampler = make_sampler(random, method, place)
        call = laid_out(random, make_call(random, structure), place[1])
        with like_a_device() if masked else nullcontext():
            call = with_logsumexp(sampler, call)
            output = attempt(sampler, call)
            assert not isinstance(output, Exception), output
            outcomes.extend(compare_all(sampler, call, output))

    run()
    assert outcomes.count("same") >= 0.8 * len(outcomes) > 100


def test_hostile_rows_are_sampled_as_by_the_reference(place):
    compared = []

    @hostile
    @given(structures, st.sampled_from(["sample", *METHODS]), st.booleans())
    def run(structure, use, masked):
        random = random_of(structure)
        draw_tokens = sample if use == "sample" else make_sampler(random, use, place).draft
        domains = SELECT if use in ("sample", "strict") else DRAFT
        call = laid_out(random, make_row_call(random, structure), place[1])
        with like_a_device() if masked else nullcontext():
            result = attempt(draw_tokens, call)
        assert not isinstance(result, Exception), result
        batch, vocab = call["logits"].shape
        token_ids = result if use == "sample" else result.token_ids
        assert (tuple(token_ids.shape), token_ids.dtype, token_ids.requires_grad) == ((batch,), torch.int64, False)
        assert all(0 <= token < vocab for token in token_ids.tolist())
        if use != "sample":
            assert (tuple(result.logsumexp.shape), result.logsumexp.dtype) == ((batch,), torch.float32)
            assert not result.logsumexp.requires_grad
        if call["seeds"] is None:
            return
        for index, token in enumerate(token_ids.tolist()):
            # `sample` takes no backend: on a GPU it is Triton's.
            single = place[0] == "triton" or (use == "sample" and place[1] == "cuda")
            request = Request(call, index, single)
            if not request.comparable():
                continue
            compared.append(token)
            with np.errstate(all="ignore"):
                choice = sample_row(request.target, **request.arguments, domains=domains)
            assert token == choice.index or choice.margin <= request.band, (token, choice)

    run()
    assert len(compared) > 100
