"""What must hold of the likeliest tokens and the kept sets that a step returns of the rows of its tokens."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.sampling import Sampling, kept_tokens, top_logprobs, truncate, without_nan
from specdecode import SamplerOutput
from specdecode.batch import MOST_KEPT
from tests.support.differential import Case, band_of
from tests.support.logprobs import tolerance
from tests.support.truncated import of_request

NAN, INF = float("nan"), float("inf")


def assert_form(output: SamplerOutput, count: int) -> None:
    """Shapes and dtypes are as told, and nothing stands behind the last token."""
    shape, is_behind = output.token_ids.shape, output.token_ids < 0
    assert (output.top_token_ids.dtype, output.top_token_ids.shape) == (torch.int64, (*shape, count))
    assert (output.top_logprobs.dtype, output.top_logprobs.shape) == (torch.float32, (*shape, count))
    assert (output.num_kept.dtype, output.num_kept.shape) == (torch.int32, shape)
    assert (output.kept_token_ids.dtype, output.kept_token_ids.shape) == (torch.int32, (*shape, MOST_KEPT))
    assert (output.kept_cutoff.dtype, output.kept_cutoff.shape) == (torch.int64, shape)
    assert torch.equal(output.top_logprobs.isnan(), is_behind[..., None].expand_as(output.top_logprobs))
    assert torch.equal(output.num_kept == 0, is_behind)
    for ids in (output.top_token_ids, output.kept_token_ids, output.kept_cutoff[..., None]):
        assert (ids[is_behind] == -1).all()
        assert (ids >= -1).all()


def kept_up_to(row: np.ndarray, cutoff: int) -> list[int]:
    """The tokens of a row up to its cutoff, as the field's docstring tells it."""
    row = without_nan(row)
    if cutoff < 0:
        return np.flatnonzero(np.isfinite(row)).tolist()
    is_kept = (row > row[cutoff]) | ((row == row[cutoff]) & (np.arange(len(row)) <= cutoff))
    return np.flatnonzero(is_kept).tolist()


def assert_row(got: tuple, row: np.ndarray, raw: np.ndarray, sampling: Sampling, of: str, **close: float) -> None:
    """What is returned of one row is what the reference says."""
    top_ids, top, num_kept, kept_ids, cutoff = got
    kept = kept_tokens(row, sampling)
    assert num_kept == len(kept)
    is_few = len(kept) <= MOST_KEPT
    assert kept_ids == [*(kept if is_few else []), *[-1] * (MOST_KEPT - len(kept) if is_few else MOST_KEPT)]
    assert kept_up_to(row, cutoff) == kept or (len(kept) == 1 and kept == [cutoff])
    want = top_logprobs(raw, len(top), Sampling()) if of == "raw" else top_logprobs(row, len(top), sampling)
    assert top_ids == [token for token, _ in want]
    np.testing.assert_allclose(top, [each for _, each in want], **close)


def assert_right(
    output: SamplerOutput, batch: Case, options: Any, of: str, backend: str, rows: Tensor | None = None
) -> None:
    """What is returned of each emitted token's row is what the reference says, where rounding does not decide that.

    Args:
        output: of a call with these options.
        batch: its arguments.
        options: how the target truncates.
        of: `"processed"` or `"raw"`.
        backend: its backend.
        rows: the target's rows, adjusted; None: as they are.
    """
    count, dtype = output.top_logprobs.shape[-1], batch.target_logits.dtype
    assert_form(output, count)
    compared, emitted = 0, int((output.token_ids >= 0).sum())
    fields = [each.tolist() for each in (output.token_ids, *output[-5:])]
    for index, (tokens, *lists) in enumerate(zip(*fields)):
        raw = batch.target_logits[index].double().cpu().numpy()
        processed = raw if rows is None else rows[index].double().cpu().numpy()
        sampling = Sampling(float(batch.temperature[index]), **of_request(options, index))
        for offset, token in enumerate(tokens):
            if token < 0 or truncate(processed[offset], sampling)[1] <= band_of(dtype, backend):
                continue
            got = tuple(each[offset] for each in lists)
            assert_row(got, processed[offset], raw[offset], sampling, of, **tolerance(dtype, backend))
            compared += 1
    assert compared >= 0.6 * emitted
