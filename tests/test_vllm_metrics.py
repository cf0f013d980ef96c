"""The log lines of the vLLM adapter: at the start and after intervals; and the page that shows them."""

import logging
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace as Namespace
from unittest.mock import Mock

import pytest
import torch

from specdecode import integrations, kernels
from specdecode.integrations.engine import MOST_OUTPUTS, Fallbacks, Interval, StepMetrics
from specdecode.integrations.vllm import DraftVerification, compat, logger, verification
from specdecode.integrations.vllm.compat import INTERVAL
from specdecode.integrations.vllm.plugin import GATHERED, AdvisedRunner
from specdecode.integrations.vllm.sampling import PROCESSORS, TRUNCATES
from specdecode.integrations.vllm.verification import LEFT_TO_VLLM, NO_FINITE_LOGIT
from tests.support.batches import verification_batch
from tests.support.vllm import (
    LEFT,
    Clock,
    PlainRejectionSampler,
    counted_output,
    group_of_ranks,
    ragged_case,
    rejection_sampler,
    sampling_states,
)

PAGE = Path(__file__).parent.parent / "docs" / "use" / "vllm.md"


def metrics_of(fallbacks, interval=60):
    """Return metrics with a clock that stands still."""
    return StepMetrics(fallbacks, interval, "left to vLLM", NO_FINITE_LOGIT, clock=Clock())


@pytest.fixture
def metrics():
    """Metrics with a line a minute."""
    return metrics_of(Fallbacks(logger))


# ---- The line of an interval -----------------------------------------------------------------------------------------


def test_an_interval_has_one_line_of_what_happened_in_it(metrics, caplog):
    caplog.set_level(logging.INFO)
    for seconds in (100, 130, 161):
        metrics.clock.now = seconds
        metrics.verified(counted_output([2, 0, 0], [3, 3, 0]))
    metrics.fallbacks.add("watermarks", "")
    metrics.tick()
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.INFO] == [
        "specdecode: in 61 s 3 steps verified, 0 left to vLLM, acceptance length 2.00, 0 invalid requests"
    ]
    for seconds in (162, 222, 222):
        metrics.clock.now = seconds
        metrics.verified(counted_output([1], [4]))
    assert caplog.messages[-1] == (
        "specdecode: in 61 s 2 steps verified, 1 left to vLLM (1 with watermarks), acceptance length 2.00, "
        "0 invalid requests"
    )


def test_an_interval_without_verified_steps_says_which_were_left_and_why(metrics, caplog):
    caplog.set_level(logging.INFO)
    for reason in ("watermarks", "penalties", "watermarks"):
        metrics.fallbacks.add(reason, "")
    metrics.clock.now += 60
    metrics.tick()
    metrics.tick()
    assert caplog.messages[-1] == (
        "specdecode: in 60 s 0 steps verified, 3 left to vLLM (2 with watermarks; 1 with penalties), acceptance length -, "
        "0 invalid requests"
    )


def test_requests_without_a_finite_logit_are_counted_and_warned_of(caplog):
    caplog.set_level(logging.INFO)
    case, _, _ = ragged_case()
    case["logits"][int(case["cu_num_logits"][3])] = torch.nan
    case["logits"][int(case["cu_num_logits"][9])] = -torch.inf
    result = rejection_sampler("strict", sampling_states(64, 50), 4)
    result.metrics = metrics_of(result.fallbacks)
    result._verify(draft_logits=None, **case)
    result.metrics.clock.now += 60
    for _ in range(2):
        result.metrics.tick()
    assert "specdecode: 2 requests had a row without a finite logit" in caplog.text
    assert "2 invalid requests" in caplog.messages[-2]


def test_an_interval_of_zero_has_no_line_but_warnings(caplog):
    caplog.set_level(logging.INFO)
    silent = metrics_of(Fallbacks(logger), 0)
    silent.verified(counted_output([0], [2], torch.ones(1, dtype=torch.bool)))
    silent.clock.now += 60
    for _ in range(2):
        silent.tick()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_sums_are_read_only_once_they_have_been_copied(metrics, caplog):
    caplog.set_level(logging.INFO)
    copied = Mock()
    copied.query.side_effect = [False, False, True]
    metrics.ended = Interval(60, 4, Counter(), torch.tensor([4, 5, 0]), copied)
    metrics.tick()
    metrics.tick()
    assert caplog.messages == []
    metrics.tick()
    assert "acceptance length 2.25" in caplog.messages[-1]
    copied.synchronize.assert_not_called()


def test_outputs_are_kept_for_a_bounded_number_of_steps(metrics):
    for _ in range(2 * MOST_OUTPUTS + 7):
        metrics.verified(counted_output([1, 0], [2, 2]))
        assert len(metrics.outputs) < MOST_OUTPUTS
    assert metrics.sums.tolist() == [4 * MOST_OUTPUTS, 2 * MOST_OUTPUTS, 0]


# ---- The line at the start -------------------------------------------------------------------------------------------


class Engines(PlainRejectionSampler):
    """The attributes that vLLM's constructor sets."""

    def __init__(self, sampler, num_drafts, **members):
        self.sampler, self.num_speculative_steps = sampler, num_drafts
        self.watermark_key = self.synthetic_conditional_rates = None
        self.fly_window_size = 0
        self.__dict__ |= members


@pytest.fixture
def start(monkeypatch, caplog):
    """Make a rejection sampler as vLLM does; return it and its log messages."""
    caplog.set_level(logging.INFO)
    installed = {"vllm": "0.33.0", "torch": "2.11.0", "triton": "3.6.0"}
    monkeypatch.setattr(verification, "version_of", installed.get)
    monkeypatch.setattr(compat, "version_of", installed.get)
    monkeypatch.setattr(verification.specdecode, "__version__", "0.1.0", raising=False)
    for variable in (INTERVAL, "VLLM_BATCH_INVARIANT"):
        monkeypatch.delenv(variable, raising=False)

    def made(method="probabilistic", sampler=(), num_drafts=3, **members):
        like = rejection_sampler(method, sampling_states(4, 50), 3)
        # The constructor checks the attributes of vLLM's own objects.
        del like.sampler.apply_sampling_params, like.sampler.noted
        vars(like.sampler).update(sampler)
        kind = type("RejectionSampler", (DraftVerification, Engines), {"verifier": like.verifier})
        caplog.clear()
        return kind(like.sampler, num_drafts, **members), [*caplog.messages]

    made.installed = installed
    return made


ALONE = (
    "specdecode 0.1.0: method 'probabilistic' verifies the drafts, up to 3 a request (vllm 0.33.0, torch 2.11.0, triton "
    "3.6.0); left to vLLM by configuration: "
)
LISTS = "steps with log-probabilities"


@pytest.mark.parametrize(
    ("method", "members", "sampler", "left"),
    [
        ("probabilistic", {}, {}, "nothing"),
        ("probabilistic", {"watermark_key": 7}, {}, "all steps, with watermarks"),
        ("probabilistic", {}, {"return_sampling_mask": True, "logprobs_mode": "processed_logprobs"}, "nothing"),
        ("probabilistic", {}, {"logprobs_mode": "processed_logits"}, f"{LISTS}, with logprobs_mode 'processed_logits'"),
        (
            "strict",
            {},
            {"logprobs_mode": "processed_logits"},
            f"the logits of {LISTS}, with logprobs_mode 'processed_logits'",
        ),
    ],
)
def test_the_start_says_method_versions_and_what_is_left_by_configuration(method, members, sampler, left, start):
    result, messages = start(method, sampler, **members)
    assert messages == [ALONE.replace("probabilistic", method) + left]
    assert result.metrics.interval == 60


@pytest.mark.parametrize(
    ("method", "members", "how"),
    [
        ("probabilistic", {}, "1 left to vLLM (1 with penalties)"),
        ("strict", {}, "1 of them from logits that vLLM prepared (1 with penalties)"),
        ("strict", {"watermark_key": 3}, "1 left to vLLM (1 with penalties)"),
    ],
)
def test_a_line_tells_steps_that_are_left_from_those_that_are_prepared(method, members, how, start, caplog):
    result, _ = start(method, **members)
    result.fallbacks.add("penalties", "")
    result.metrics.log(result.metrics.end(60))
    assert f"steps verified, {how}, acceptance length" in caplog.messages[-1]


@pytest.mark.parametrize("value", [0.1, 3, True, "mean"])
@pytest.mark.parametrize("holder", ["RejectionSampler", "Sampler", "SamplingStates"])
def test_an_attribute_that_is_unknown_and_not_off_leaves_all_steps_to_vllm(holder, value, start):
    given = {"RejectionSampler": {"typical_eps": value}, "Sampler": {"sampler": {"typical_eps": value}}}
    if holder == "SamplingStates":
        states = sampling_states(4, 50)
        states.typical_eps = value
        given[holder] = {"sampler": {"sampling_states": states}}
    result, messages = start(**given[holder])
    reason = f"what vLLM 0.33.0 has and this version of specdecode does not know ({holder}.typical_eps)"
    assert messages == [f"{ALONE}all steps, with {reason}"]
    assert result.other_rule() == result.sampler.unknown == reason


def test_a_sampler_of_another_class_leaves_all_steps_to_vllm(start, monkeypatch):
    sampler = Namespace(sampling_states=None)
    monkeypatch.setattr(Engines, "sampler", property(lambda self: sampler, lambda self, given: None), raising=False)
    result, messages = start()
    assert messages == [f"{ALONE}all steps, with a sampler of another class (SimpleNamespace)"]
    case, _, _ = ragged_case()
    assert result._verify(draft_logits=None, **case) is LEFT
    batch = Namespace(idx_mapping_np=case["idx_mapping_np"])
    where = case["draft_sampled"], case["pos"], 7, -1, None
    assert result._verify_in_chunks(case["logits"], batch, None, *where) == (case["logits"], batch, None, *where)


@pytest.mark.parametrize("off", [None, False, 0, 0.0])
def test_an_unknown_attribute_that_is_off_changes_nothing(off, start):
    assert start(typical_eps=off)[0].other_rule() is None


def test_what_this_packages_sampler_keeps_is_known(start):
    kept = {"needs": [1], "shards_batches": True, "compiled_dtypes": {1}, "copies": (1,)}
    kept |= {"unknown": "before", "known": True, "grammar": True, "reads_grammars": True}
    assert start(sampler=kept)[0].other_rule() is None


def test_another_version_is_warned_of(start):
    start.installed["vllm"] = "0.34.1"
    _, (_, warning) = start()
    assert warning == "specdecode: vllm 0.34.1 is not one of the versions that it was run with, 0.33.x"


@pytest.mark.parametrize(("method", "warned"), [("probabilistic", True), ("block", True), ("strict", False)])
def test_batch_invariance_is_warned_of_where_noise_depends_on_the_batch(method, warned, start, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    _, messages = start(method)
    assert ["VLLM_BATCH_INVARIANT" in message for message in messages] == [False] + [True] * warned


@pytest.mark.parametrize(("rank", "shards", "reports"), [(0, False, True), (1, False, False), (1, True, True)])
def test_one_rank_reports_and_each_compiles_a_part_or_each_that_verifies_other_requests_does_all(
    rank, shards, reports, start, monkeypatch
):
    ranks = group_of_ranks(monkeypatch, rank, 2)
    result, messages = start(sampler={"shards_batches": shards})
    assert (result.metrics is not None) == bool(messages) == reports
    assert dict(result.fallbacks) == {}
    assert result.sampler.share() == (() if shards else (rank, 2, ranks.barrier))


class PlainRunner:
    """The attributes that vLLM's model runner sets."""

    sampler = rejection_sampler = None

    def load_model(self, model, sampler, is_last):
        self.model = model
        if is_last:
            self.rejection_sampler, self.sampler = sampler, sampler.sampler


@pytest.mark.parametrize(
    ("size", "change", "told"),
    [(2, None, True), (1, None, False), (2, "flag", False), (2, "model", False), (2, "pipeline", False)],
)
def test_several_gpus_that_gather_logits_are_told_once_of_a_flag_that_saves_it(
    size, change, told, start, monkeypatch, caplog
):
    model, lines = Namespace(**({} if change == "model" else {"compute_logits_local": None})), []
    for rank in range(size):
        group_of_ranks(monkeypatch, rank, size)
        result, _ = start(sampler={"shards_batches": change == "flag"})
        caplog.clear()
        type("Runner", (AdvisedRunner, PlainRunner), {})().load_model(model, result, is_last=change != "pipeline")
        lines += caplog.messages
    assert lines == [GATHERED % 2] * told


# ---- The page --------------------------------------------------------------------------------------------------------


def lines_of_the_page():
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if "specdecode" in line.lower()]


def test_the_log_lines_on_the_page_are_those_that_are_logged(start, monkeypatch, caplog):
    if not PAGE.exists():
        pytest.skip("not in a checkout")
    start.installed["vllm"] = "0.34.1"
    _, logged = start(typical_eps=0.1)
    start.installed["vllm"] = "0.33.0"
    logged += start("strict", num_drafts=4)[1]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    result, messages = start()
    logged += messages
    caplog.clear()
    metrics, rows = result.metrics, torch.zeros(1, 32, 50)
    batch = verification_batch(rows, torch.zeros(1, 31, dtype=torch.int64), None, None, 1.0, 0, None, top_p=0.9)
    limit = kernels.why_not_verified("probabilistic", batch)
    result.kinds[torch.bfloat16, None] = None, limit
    for needs, steps in ((PROCESSORS, 12), (TRUNCATES, 1)):
        for _ in range(steps):
            result.fallbacks.add(result.why_not((torch.bfloat16, None), needs), LEFT_TO_VLLM)
    left = Counter({result.why_not(None, PROCESSORS): 12})
    metrics.log(Interval(60, 3158, left, torch.tensor([98_000, 128_380, 2])))
    logged += caplog.messages
    monkeypatch.setenv(integrations.VLLM_SWITCH, "exact")
    with pytest.raises(ValueError, match="SPECDECODE_VLLM") as error:
        integrations.register_vllm()
    logged += [f"ValueError: {error.value}", GATHERED % 2]
    shown = lines_of_the_page()
    assert len(shown) == 10
    assert set(shown) <= set(logged)
