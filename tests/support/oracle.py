"""The comparison of a call's output with the oracle's, request by request: tokens, flags, log-probabilities and lists."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reference import oracle
from reference.oracle import Outcome
from reference.sampling import Sampling, kept_tokens, spread, top_logprobs, truncate, without_nan
from reference.sampling import processed_logprobs as processed_logprobs_of
from specdecode import AcceptanceSchedule, SamplerOutput
from tests.support import adjusted
from tests.support.differential import FLOAT32_BAND, FLOAT64_BAND

FLOAT32_TOLERANCE = 2e-5
"""The tolerance of a log-probability computed in float32, in nats: the largest operands of a subtraction are about 70,
and their rounding is 4e-6. In float64 only the result is rounded, to the returned float32."""

MOST_KEPT = 1024
"""The most tokens that a kept set lists."""

SCHEDULE = AcceptanceSchedule.from_rates([0.75, 0.6, 0.5, 0.4, 0.3])


class Expected(NamedTuple):
    """The oracle's result for one request."""

    outcome: Outcome
    raw: Any  # [num_rows, vocab] the model's logits
    rows: list  # the same rows, adjusted
    sampling: Sampling


def number(value: Tensor | float | None, index: int, default: Any) -> Any:
    """Return one request's value of an argument that may be a tensor, a number or None."""
    if isinstance(value, Tensor):
        return value[index].item()
    return default if value is None else value


def sampling_of(temperature: Any, top_k: Any, top_p: Any, min_p: Any, index: int) -> Sampling:
    """Return one request's sampling parameters."""
    limits = number(top_k, index, None), number(top_p, index, 1.0), number(min_p, index, 0.0)
    return Sampling(float(number(temperature, index, 1.0)), *limits)


def seed_of(seeds: Tensor | int, index: int) -> int:
    """Return one request's seed; an int means consecutive seeds."""
    return int(seeds[index]) if isinstance(seeds, Tensor) else seeds + index


def draft_rows(arguments: Mapping, index: int, how: Sampling, vocab: int) -> tuple[Any, Sampling, float]:
    """Return one request's draft rows over the target's tokens, their parameters, and the margin of their truncation."""
    rows = arguments["draft_logits"][index].double().cpu().numpy()
    ids = arguments.get("draft_vocab_ids")
    if ids is None:
        return rows, how, np.inf
    kept = [truncate(row, how) for row in rows]  # truncated first, over the draft's own ids
    margin = min([margin for _, margin in kept], default=np.inf)
    return [spread(row, ids.cpu().numpy(), vocab) for row, _ in kept], Sampling(how.temperature), margin


def expected_of(method: str, arguments: Mapping, index: int, schedule: AcceptanceSchedule = SCHEDULE) -> Expected:
    """Return the oracle's result for one request of a padded call."""
    limits = [arguments.get(name) for name in ("top_k", "top_p", "min_p")]
    sampling = sampling_of(arguments.get("temperature", 1.0), *limits, index)
    logits, token_ids = arguments["target_logits"][index].cpu(), arguments["draft_token_ids"][index].tolist()
    raw, rows, vocab = logits.double().numpy(), logits.double().numpy(), logits.shape[-1]
    options: dict[str, Any] = {**sampling._asdict(), "seed": seed_of(arguments["seeds"], index)}
    options["position"] = number(arguments.get("positions"), index, 0)
    adjustments, adjusted_rows = arguments.get("adjustments"), list(rows)
    if adjustments is not None:
        rows = logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy()
        options["adjustments"] = adjusted.of_request(adjustments, index, vocab)
        drafts = oracle.leading_drafts(token_ids, vocab)
        adjusted_rows = oracle.adjusted_rows(rows, drafts, options["adjustments"])
    draft, margin = None, np.inf
    if arguments.get("draft_logits") is not None and method != "strict":
        told = arguments.get("draft_sampling")
        how = sampling if told is None else sampling_of(*told, index)
        draft, options["draft_sampling"], margin = draft_rows(arguments, index, how, vocab)
    if method == "synthetic":
        options["conditional_rates"] = schedule.conditional_rates
    with np.errstate(all="ignore"):
        outcome = oracle.verify(method, rows, token_ids, draft, **options)
    return Expected(outcome._replace(margin=min(outcome.margin, margin)), raw, adjusted_rows, sampling)


def band_of(arguments: Mapping, backend: str) -> float:
    """Return the largest margin of the oracle, in nats, at which a backend may differ: see `FLOAT32_BAND`."""
    floats = [arguments["target_logits"], arguments.get("draft_logits")]
    in_float64 = all(each is None or each.dtype == torch.float64 for each in floats)
    is_given = arguments.get("draft_logsumexp") is not None  # which is float32
    return FLOAT64_BAND if in_float64 and backend == "eager" and not is_given else FLOAT32_BAND


def assert_equals_oracle(
    method: str, arguments: Mapping, output: SamplerOutput, backend: str, schedule: AcceptanceSchedule = SCHEDULE
) -> None:
    """Check all results of a call.

    A request's tokens may differ only if the oracle's margin is within the band, and only for one request of a batch, and
    one more per hundred. Log-probabilities and lists are compared if the truncation of their row has a larger margin.

    Args:
        method: the sampler's method.
        arguments: of the padded call, by name.
        output: of this call, or of an equivalent one.
        backend: "eager" or "triton".
        schedule: of a synthetic sampler.
    """
    assert_form(arguments, output)
    band, excused, compared = band_of(arguments, backend), 0, 0
    for index, got in enumerate(output.token_ids.tolist()):
        expected = expected_of(method, arguments, index, schedule)
        outcome = expected.outcome
        want = outcome.token_ids + [-1] * (len(got) - len(outcome.token_ids))
        if got != want:
            assert outcome.margin <= band, f"request {index}: {got} != {want}, decided by {outcome.margin:.2e} nats"
            excused += 1
            continue
        assert bool(output.invalid[index]) == outcome.invalid, f"request {index}: invalid"
        for offset in range(len(outcome.token_ids)):
            is_clear = truncate(expected.rows[offset], expected.sampling)[1] > band
            compared += is_clear
            if is_clear:
                assert_row(arguments, output, expected, index, offset, band)
    assert excused <= 1 + len(output.token_ids) // 100
    if output.logprobs is not None or output.num_kept is not None:
        assert compared >= 0.5 * int((output.token_ids >= 0).sum())


def assert_form(arguments: Mapping, output: SamplerOutput) -> None:
    """Check shapes, dtypes and padding: accepted drafts, one more token of the vocabulary, then nothing."""
    batch, num_rows, vocab = arguments["target_logits"].shape
    tokens = batch, num_rows
    num_top, fields = arguments.get("top_logprobs") or 0, {}
    fields |= {"token_ids": (torch.int64, tokens), "num_accepted": (torch.int32, (batch,))}
    fields |= {"num_draft_tokens": (torch.int32, (batch,)), "invalid": (torch.bool, (batch,))}
    if arguments.get("logprobs"):
        fields["logprobs"] = torch.float32, tokens
    if num_top:
        fields["top_token_ids"] = torch.int64, (*tokens, num_top)
        fields["top_logprobs"] = torch.float32, (*tokens, num_top)
    if arguments.get("kept_sets"):
        fields |= {"num_kept": (torch.int32, tokens), "kept_cutoff": (torch.int64, tokens)}
        fields["kept_token_ids"] = torch.int32, (*tokens, MOST_KEPT)
    for name, value in output._asdict().items():
        if name not in fields:
            assert value is None, f"{name} was not asked for"
            continue
        assert (value.dtype, tuple(value.shape)) == fields[name], name
        assert not value.requires_grad, name
    drafted = [oracle.leading_drafts(ids, vocab) for ids in arguments["draft_token_ids"].tolist()]
    assert output.num_draft_tokens.tolist() == [len(ids) for ids in drafted]
    for ids, got, accepted in zip(drafted, output.token_ids.tolist(), output.num_accepted.tolist()):
        assert got[:accepted] == ids[:accepted]
        assert 0 <= got[accepted] < vocab
        assert got[accepted + 1 :] == [-1] * (num_rows - accepted - 1)
    assert output.num_tokens.tolist() == [accepted + 1 for accepted in output.num_accepted.tolist()]
    is_behind = output.token_ids < 0
    if output.logprobs is not None:
        assert output.logprobs.isnan().equal(is_behind)
    if output.top_logprobs is not None:
        assert output.top_logprobs.isnan().equal(is_behind[..., None].expand_as(output.top_logprobs))
    if output.num_kept is not None:
        assert (output.num_kept == 0).equal(is_behind)
    for ids in (output.top_token_ids, output.kept_token_ids, output.kept_cutoff):
        assert ids is None or (ids[is_behind] == -1).all()


def kept_up_to(row: np.ndarray, cutoff: int) -> list[int]:
    """Return the tokens of a row up to its cutoff, by decreasing logits, and by increasing ids for equal logits."""
    row = without_nan(row)
    if cutoff < 0:
        return np.flatnonzero(np.isfinite(row)).tolist()
    is_kept = (row > row[cutoff]) | ((row == row[cutoff]) & (np.arange(len(row)) <= cutoff))
    return np.flatnonzero(is_kept).tolist()


def assert_row(
    arguments: Mapping, output: SamplerOutput, expected: Expected, index: int, offset: int, band: float
) -> None:
    """Check the results for one emitted token's row."""
    where = f"request {index}, row {offset}"
    close = {"rtol": 1e-7, "atol": 1e-9} if band == FLOAT64_BAND else {"rtol": 1e-6, "atol": FLOAT32_TOLERANCE}
    processed, sampling = expected.rows[offset], expected.sampling
    row, how = (expected.raw[offset], Sampling()) if arguments.get("logprobs") == "raw" else (processed, sampling)
    if output.logprobs is not None:
        want = processed_logprobs_of([row], [expected.outcome.token_ids[offset]], how)[0]
        np.testing.assert_allclose(float(output.logprobs[index, offset]), want, **close, err_msg=where)
    if output.top_logprobs is not None:
        top = top_logprobs(row, output.top_logprobs.shape[-1], how)
        assert output.top_token_ids[index, offset].tolist() == [token for token, _ in top], where
        got = output.top_logprobs[index, offset].tolist()
        np.testing.assert_allclose(got, [each for _, each in top], **close, err_msg=where)
    if output.num_kept is not None:
        kept, cutoff = kept_tokens(processed, sampling), int(output.kept_cutoff[index, offset])
        assert int(output.num_kept[index, offset]) == len(kept), where
        listed = kept if len(kept) <= MOST_KEPT else []
        assert output.kept_token_ids[index, offset].tolist() == listed + [-1] * (MOST_KEPT - len(listed)), where
        assert kept_up_to(processed, cutoff) == kept or kept == [cutoff], where
