"""The tool that compares verifications in engines, without them: SGLang's switch in its scheduler, and results of runs."""

import argparse
import json
import sys
from importlib.metadata import entry_points
from types import ModuleType
from types import SimpleNamespace as Namespace

import numpy as np
import pytest
import torch

from tests.tools import check_engine, sglang_engine
from tests.tools.check_engine import ALARM, OURS, REQUESTS, Served, checked, greedy, p_value, tokens
from tests.tools.sglang_engine import (
    IN_TURN,
    LONG,
    MODES,
    ROUNDS,
    SGLANG,
    Control,
    Hold,
    Switch,
    register,
    write_plugin,
)
from tests.tools.sglang_engine import timed as timed_cells


def test_sglang_finds_the_plug_in_in_a_folder_on_the_path(tmp_path, monkeypatch):
    write_plugin(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    [entry] = [each for each in entry_points(group="sglang.srt.plugins") if each.name == "check_sglang"]
    assert entry.load() is register
    assert entry.dist.name == "check-sglang"
    register()  # which does nothing without the variable


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    sglang_engine.add_arguments(parser)
    return parser.parse_args(["--draft", "eagle", *arguments])


@pytest.mark.parametrize(("arguments", "topk", "nodes"), [((), 1, 4), (("--tree", "4", "12"), 4, 12)])
def test_sglang_is_started_with_chains_or_trees(arguments, topk, nodes):
    given = sglang_engine.engine_arguments(parsed(*arguments))
    assert given["speculative_num_steps"] == 3
    assert (given["speculative_eagle_topk"], given["speculative_num_draft_tokens"]) == (topk, nodes)


def test_drawn_trees_are_refused():
    with pytest.raises(SystemExit, match=r"^--tree: expected no --drawn"):
        sglang_engine.start(parsed("--drawn", "--tree", "4", "12"))


# ---- In the scheduler ------------------------------------------------------------------------------------------------


class Event:
    """Stands in for a CUDA event; 2 ms pass between any two."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, later):
        return 2.0


class Scheduler:
    """A switch, and steps for it."""

    def __init__(self, path):
        self.switch, self.hook, self.called = Switch(Control(path)), Namespace(fallbacks={"watermarks": 3}), []

    def ours(self, hook, original, verify_input, batch):
        self.called.append(OURS)
        return None, torch.full((len(batch.reqs),), 2), None

    def theirs(self, verify_input, batch):
        self.called.append(SGLANG)
        return None, torch.full((len(batch.reqs),), 3), None

    def step(self, requests=4, idle=False):
        batch = Namespace(forward_mode=Namespace(is_idle=lambda: idle), reqs=[None] * requests)
        self.switch(self.hook, self.ours, self.theirs, None, batch)


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Scheduler(tmp_path / "control")


def test_the_control_file_says_who_verifies_a_step(scheduler, tmp_path):
    control = Control(tmp_path / "control")  # another process's
    for mode in (SGLANG, OURS, SGLANG):
        control["mode"] = MODES.index(mode)
        scheduler.step()
    control["mode"] = MODES.index(OURS)
    scheduler.step(idle=True)
    assert scheduler.called == [SGLANG, OURS, SGLANG, SGLANG]
    assert scheduler.switch.verified == {SGLANG: 2, OURS: 1}


def test_a_report_has_the_steps_that_were_verified_in_turn_since_the_last(scheduler, tmp_path):
    control = Control(tmp_path / "control")
    for asked in (1, 2):
        control["mode"] = MODES.index(IN_TURN)
        for _ in range(24):
            scheduler.step()
        control["mode"], control["asked"] = MODES.index(OURS), asked
        assert not control.report(asked).exists()
        scheduler.step()  # when it looks for the question
        report = json.loads(control.report(asked).read_text())
        assert [step["mode"] for step in report["steps"]] == [OURS] * 6 + [SGLANG] * 12 + [OURS] * 6
        assert [step["stretch"] for step in report["steps"]] == [i // 6 for i in range(24)]
        assert {(step["mode"], step["emitted"]) for step in report["steps"]} == {(OURS, 8), (SGLANG, 12)}
        assert {step["verify_device_us"] for step in report["steps"]} == {2000.0}
        assert report["fallbacks"] == {"watermarks": 3}
    assert report["verified"] == {OURS: 25, SGLANG: 24}  # the report's own step is verified after it


def test_a_prefill_waits_for_all_requests_but_not_for_ever(tmp_path, monkeypatch, capsys):
    module = ModuleType("sglang.srt.managers.scheduler")
    module.NextBatchPlan = Namespace
    monkeypatch.setitem(sys.modules, module.__name__, module)
    clock = [100.0]
    monkeypatch.setattr(sglang_engine.time, "monotonic", lambda: clock[0])
    control = Control(tmp_path / "control")
    hold = Hold(control)

    def is_held(waiting):
        plan = hold(lambda scheduler, running: "prefill", Namespace(waiting_queue=[None] * waiting), "running")
        return plan == Namespace(batch_to_run=None, running_batch="running")

    assert not is_held(1)
    for wanted in (3, 2):
        control["held"] = wanted
        assert [is_held(wanted - 1), is_held(wanted), is_held(1)] == [True, False, False]
    assert capsys.readouterr().out == ""
    control["held"] = 3
    assert is_held(2)
    clock[0] += sglang_engine.HOLD
    assert not is_held(2)
    assert "only 2 of 3 requests wait" in capsys.readouterr().out


# ---- What follows from a run -----------------------------------------------------------------------------------------


class Engine:
    """Stands in for a switched engine: what it returns by mode, and steps of known times."""

    name, tokens, requests = SGLANG, 6, [4]
    gaps = sglang_engine.SwitchedEngine.gaps

    def __init__(self, texts=None, repeats=True, samples=2000, wrong=()):
        self.texts, self.repeats, self.samples, self.wrong = texts or {}, repeats, samples, [*wrong]
        self.served = []

    def serve(self, mode, prompts, sampling, tokens, held=False):
        self.served.append((mode, tokens))
        make = self.texts.get(mode, lambda i: [0] * 6)
        return Served([make(i) for i in range(len(prompts))], {"acceptance length": 2.0})

    def samplings(self):
        return {"T .8": {"temperature": 0.8}}

    def errors(self):
        return self.wrong

    def report(self):
        """Return 60 steps: ours of 1 ms, SGLang's of 1.5, slow ones first in each stretch, the last of fewer requests."""
        steps, start = [], 0.0
        for i in range(60):
            stretch, mode = sglang_engine.turn(i)
            times = {"verify_host_us": 7.0 if mode == OURS else 5.0, "verify_device_us": 3.0}
            steps.append({"mode": mode, "stretch": stretch, "start": start, "emitted": 8, "requests": 4} | times)
            start += 9.0 if i % 6 < 2 else 1.0e-3 if mode == OURS else 1.5e-3
            if i >= 51:
                start += 5.0
            if i >= 52:
                steps[-1] |= {"requests": 3, "emitted": 6}
        return {"steps": steps}


def test_the_ratio_is_of_full_batches_after_the_first_steps_of_each_stretch():
    engine = Engine()
    _, cell = next(timed_cells(engine))
    assert [cell[key] for key in ("ratio", "ratio_low", "ratio_high")] == pytest.approx([1.5] * 3)
    assert (cell[OURS]["step_us"], cell[SGLANG]["step_us"]) == (1000.0, 1500.0)
    assert (cell[OURS]["verify_host_us"], cell[SGLANG]["verify_host_us"]) == (7.0, 5.0)
    assert cell["pairs"] == 4 * ROUNDS  # the fifth of each round has too few requests
    assert engine.served == [(OURS, 24), (SGLANG, 24)] + [(IN_TURN, LONG)] * ROUNDS


class Runs:
    """Texts of one verification in each run: so many of the second run differ from the first's."""

    def __init__(self, *differing):
        self.differing, self.calls = differing, 0

    def __call__(self, i):
        run, self.calls = self.calls // REQUESTS, self.calls + 1
        return [0, 0, 7 if i < self.differing[run] else 0]


@pytest.mark.parametrize(
    ("ours", "again", "drawn", "wrong"),
    [
        ((0, 0), 0, False, False),
        ((1, 0), 0, False, True),
        ((0, 1), 0, False, True),
        ((1, 1), 0, True, False),
        ((4, 6), 4, True, False),
        ((4, 6), 4, False, False),
        ((40, 4), 4, True, True),
        ((4, 40), 4, True, True),
    ],
)
def test_greedy_texts_are_wrong_if_they_differ_more_than_the_engines_own(ours, again, drawn, wrong):
    [(_, result)] = greedy(Engine({OURS: Runs(*ours), SGLANG: Runs(0, again)}, repeats=not drawn))
    counts = [f"{REQUESTS - differing}/{REQUESTS}" for differing in (ours[0], again, ours[1])]
    assert [result["plain"][run] for run in (OURS, "again", "ours again")] == counts
    assert result["plain"].get("gaps", []) == [2] * ours[0]
    assert result["wrong"] is wrong


def test_texts_are_compared_by_kind():
    """Texts of no kind are not compared; those that a kind changes are counted."""
    runs = Engine({OURS: lambda i: [7 if i in (1, 2, 5) else 0], SGLANG: lambda i: [0]}, repeats=False)
    kinds = ["a", "a", "b", "b", "b", ""]
    result = check_engine.compared(runs, [[5]] * 6, {}, kinds, plain=[[0, 1], [0], [1], [1], [0], [1]])
    assert result["a"] == {OURS: "1/2", "again": "2/2", "ours again": "1/2", "changed": 0}
    assert result["b"] == {OURS: "2/3", "again": "3/3", "ours again": "2/3", "changed": 2}
    assert result["requests"] == 5


def texts_of(rng, probabilities):
    return lambda i: rng.choice(len(probabilities), 6, p=probabilities).tolist()


def test_samples_of_one_distribution_raise_no_alarm_and_those_of_another_do():
    rng = np.random.default_rng(3)
    right = np.geomspace(1, 0.05, 100)
    wrong = right * np.where(np.arange(100) % 2, 0.7, 1.3)
    right, wrong = right / right.sum(), wrong / wrong.sum()
    for theirs, is_alarm in ((right, False), (wrong, True)):
        [(_, result)] = tokens(Engine({OURS: texts_of(rng, right), SGLANG: texts_of(rng, theirs)}))
        assert len(result["p"]) == 6
        assert [p < ALARM for name, p in result["p"].items() if name.startswith("token ")] == [is_alarm] * 4


def test_tokens_that_depend_on_each_other_are_seen_where_each_alone_is_right():
    rng = np.random.default_rng(4)

    def same(i):
        return [int(rng.integers(8))] * 6

    independent = texts_of(rng, np.full(8, 1 / 8))
    [(_, result)] = tokens(Engine({OURS: same, SGLANG: independent}, samples=1000))
    assert {name for name, p in result["p"].items() if p < ALARM} == {"tokens 2-3", "tokens 1-4"}


def test_one_token_that_is_too_frequent_is_seen_among_many_rare_ones():
    rng = np.random.default_rng(5)
    right = [(int(token),) for token in rng.integers(100_000, size=4000)]
    wrong = [(int(token),) for token in rng.integers(100_000, size=2000)] + [(2,)] * 80
    assert p_value(right[:2000], right[2000:]) > ALARM
    assert p_value(right[:2000], wrong) < ALARM
    assert p_value([(1,)] * 5, [(2,)] * 5) == 1.0  # too few to tell


def test_errors_are_texts_that_differ_small_p_values_and_those_of_the_engine(capsys):
    parts = {"greedy": {"wrong": False}, "mixed": {"wrong": True}, "T .8": {"p": {"token 1": 0.3, "token 2": 3e-5}}}
    errors = checked(Engine(wrong=["2 steps left to SGLang: watermarks"]), [lambda engine: parts.items()])
    assert errors == ["mixed: texts differ", "T .8: token 2, p = 3e-05", "2 steps left to SGLang: watermarks"]
    assert capsys.readouterr().out.splitlines()[-3:] == errors
    assert checked(Engine(), [lambda engine: [("greedy", parts["greedy"])]]) == []


@pytest.mark.parametrize(
    ("verified", "missing"), [({OURS: 5, SGLANG: 5}, []), ({SGLANG: 5}, ["ours: no step verified"])]
)
def test_steps_that_are_left_to_sglang_or_that_one_did_not_verify_are_errors(verified, missing):
    report = {"fallbacks": {"watermarks": 2}, "verified": verified}
    errors = sglang_engine.SwitchedEngine.errors(Namespace(report=lambda: report))
    assert errors == ["2 steps left to SGLang: watermarks", *missing]
