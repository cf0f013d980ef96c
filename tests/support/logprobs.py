"""What must hold of log-probabilities, and batches with rows that hurt them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.sampling import Sampling, processed_logprobs, raw_logprobs, truncate
from specdecode import RejectionSampler, SamplerOutput
from tests.support.differential import Case, band_of
from tests.support.truncated import SCHEDULE, of_request, on

NAN, INF = float("nan"), float("inf")


FLOAT32_TOLERANCE = 2e-5
"""Of a log-probability that is computed in float32, in nats: of logits below 20, at temperatures from 0.3 on, the largest
numbers that are subtracted from each other are about 70, and a rounding of those is 4e-6. What is computed in float64 has
only been rounded once, to the float32 that is returned."""


def verify(
    method: str, batch: Case, device: str, backend: str, with_logits: bool = True, **options: Any
) -> SamplerOutput:
    batch = batch.to(device)
    return RejectionSampler(method, backend=backend, schedule=SCHEDULE if method == "synthetic" else None)(
        batch.target_logits,
        batch.draft_token_ids,
        batch.draft_logits if with_logits else None,
        temperature=batch.temperature,
        seeds=batch.seeds,
        positions=batch.positions,
        **on(device, options),
    )


def tolerance(dtype: torch.dtype, backend: str) -> dict[str, float]:
    in_float64 = dtype == torch.float64 and backend == "eager"
    return {"rtol": 1e-7, "atol": 1e-9} if in_float64 else {"rtol": 1e-6, "atol": FLOAT32_TOLERANCE}


def assert_right(output: SamplerOutput, batch: Case, options: Any, of: str, backend: str) -> None:
    """The log-probabilities of the tokens that were emitted are the reference's, and NaN behind them."""
    assert (output.logprobs.dtype, output.logprobs.shape) == (torch.float32, output.token_ids.shape)
    assert torch.equal(output.logprobs.isnan(), output.token_ids < 0)
    compared, emitted, dtype = 0, output.token_ids >= 0, batch.target_logits.dtype
    for index, (tokens, got) in enumerate(zip(output.token_ids.tolist(), output.logprobs.cpu().numpy())):
        tokens, rows = tokens[: tokens.index(-1)] if -1 in tokens else tokens, batch.rows(index)[0]
        sampling = Sampling(float(batch.temperature[index]), **of_request(options, index))
        margins = [truncate(row, sampling)[1] for row in rows[: len(tokens)]]
        # Rounding may decide what is kept of a row.
        clear = np.array(margins) > band_of(dtype, backend) if of == "processed" else np.full(len(tokens), True)
        want = processed_logprobs(rows, tokens, sampling) if of == "processed" else raw_logprobs(rows, tokens)
        np.testing.assert_allclose(got[: len(tokens)][clear], want[clear], **tolerance(dtype, backend))
        compared += int(clear.sum())
    assert compared >= 0.6 * int(emitted.sum())


def hostile(batch: Case) -> Case:
    """The batch with requests in it that are greedy, and rows that are empty, infinite or have NaN."""
    batch.temperature[0], batch.temperature[1] = 1, 0
    batch.target_logits[0, :, 2] = NAN
    batch.target_logits[2, 0, [1, 4]] = INF
    batch.target_logits[3] = -INF
    batch.draft_token_ids[2, :1] = 1  # which is accepted, in a row that is a point mass
    return batch


def with_invalid_requests(device: str) -> tuple[dict[str, Any], Tensor]:
    """Four requests of two drafts at most, of which the last alone has finite logits, and their first two tokens.

    The rows of the others are NaN or -inf, and their first draft is token 0, a token that is not, or none.
    """
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(4, 3, 40, generator=generator)
    target[:3] = torch.tensor([NAN, -INF, NAN])[:, None, None]
    target[1, :, 7] = NAN
    draft = torch.randn(4, 2, 40, generator=generator)
    draft[..., 0] = 3  # so that it is kept
    call = {
        "target_logits": target,
        "draft_token_ids": torch.tensor([[0, 3], [5, 0], [-1, 0], [1, 2]]),
        "draft_logits": draft,
    }
    first_two = torch.tensor([[0, 0], [0, -1], [0, -1]])
    return {name: value.to(device) for name, value in call.items()}, first_two


def assert_invalid_have_that_of_token_0(output: SamplerOutput, first_two: Tensor) -> None:
    """That is 0; NaN follows."""
    assert output.invalid[: len(first_two)].all()
    assert output.token_ids[: len(first_two), :2].tolist() == first_two.tolist()
    assert (output.token_ids[: len(first_two), 2] == -1).all()
    of_tokens = output.logprobs[: len(first_two)].cpu()
    assert torch.equal(of_tokens[:, :2].isnan(), first_two < 0)
    assert of_tokens[:, 2].isnan().all()
    assert (of_tokens.nan_to_num(nan=0) == 0).all()
