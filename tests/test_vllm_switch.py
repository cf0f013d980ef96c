"""An environment variable makes vLLM verify with this package; without it nothing is changed."""

import inspect
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest

from specdecode import integrations
from specdecode.integrations import vllm
from specdecode.integrations.vllm import RUNNER, DraftVerification, TokenSampling
from specdecode.integrations.vllm.compat import INTERVAL
from specdecode.integrations.vllm.grammars import GrammarSteps, KeptGrammars
from specdecode.integrations.vllm.plugin import AdvisedRunner
from tests.support.vllm import METHODS, PlainRejectionSampler


class Sampler:
    """A sampler with vLLM's arguments, and the names that vLLM's sampler uses."""

    def apply_sampling_params(self, logits):
        return self.sampling_states.apply_min_p(logits)

    def sample(
        self,
        logits,
        expanded_idx_mapping,
        idx_mapping,
        idx_mapping_np,
        pos,
        input_ids,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        return_logprobs=False,
    ):
        return self._sample_random(self.apply_sampling_params(logits))


class EnginesRejectionSampler(PlainRejectionSampler):
    """A rejection sampler with the name of vLLM's."""

    def _verify(
        self,
        logits,
        draft_logits,
        draft_sampled,
        pos,
        cu_num_logits,
        idx_mapping,
        idx_mapping_np,
        expanded_idx_mapping,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        verify_draft_sampled,
    ):
        return rejection_sample(self.sampler.apply_sampling_params(logits))

    def _verify_in_chunks(
        self,
        logits,
        input_batch,
        draft_logits,
        draft_sampled,
        pos,
        max_chunk_logits,
        max_num_logprobs,
        verify_draft_sampled=None,
    ):
        return max_chunk_logits


def rejection_sample(target_logits, seed=0):
    return target_logits


def add_request(self, req_idx, sampling_params):
    self.top_p.np[req_idx] = sampling_params.top_p


def validate_spec_decode(self, speculative_config):
    if speculative_config is not None and (self.min_p > _SAMPLING_EPS or self.logit_bias):
        raise VLLMValidationError("not yet supported")


validate_spec_decode.__name__ = "_validate_spec_decode"
_SAMPLING_EPS, VLLMValidationError = 1e-5, ValueError


def sample(self, hidden_states, input_batch, grammar_output):
    """The method of the model runner."""


def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask):
    """The method of the grammar worker."""
    self.copy_stream.wait_stream(input_batch.req_ids)


@pytest.fixture
def runner(monkeypatch):
    """Replace vLLM's model runner by a module."""

    class InputProcessor:
        def __init__(self, vllm_config):
            self.vllm_config = vllm_config

    parameters = type(
        "SamplingParams", (), {"_validate_spec_decode": validate_spec_decode, "min_p": 0.0, "logit_bias": {}}
    )
    module = Namespace(
        Sampler=type("Sampler", (Sampler,), {}),
        RejectionSampler=type("RejectionSampler", (EnginesRejectionSampler,), {}),
        GPUModelRunner=type("GPUModelRunner", (), {"sample": sample}),
        StructuredOutputsWorker=type("StructuredOutputsWorker", (), {"apply_grammar_bitmask": apply_grammar_bitmask}),
    )
    modules = {
        RUNNER: module,
        "vllm.v1.worker.gpu.sample.states": Namespace(SamplingStates=Namespace(add_request=add_request)),
        "vllm.sampling_params": Namespace(SamplingParams=parameters),
        "vllm.v1.engine.input_processor": Namespace(InputProcessor=InputProcessor),
    }
    for name in modules:
        for i, letter in enumerate(name):
            if letter == ".":
                monkeypatch.setitem(sys.modules, name[:i], Namespace(__path__=[]))
    for name, stand_in in modules.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    return module


@pytest.mark.parametrize("value", [None, ""])
def test_nothing_is_touched_without_the_environment_variable(value, runner, monkeypatch):
    monkeypatch.delenv(integrations.VLLM_SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(integrations.VLLM_SWITCH, value)
    before = dict(vars(runner))
    integrations.register_vllm()
    assert vars(runner) == before


def test_the_entry_points_exist_and_cost_no_import():
    root = Path(__file__).parent.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("not in a checkout")
    groups = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        module, _, function = groups[group]["specdecode"].partition(":")
        assert callable(getattr(import_module(module), function))
    code = "import sys, specdecode.integrations; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@pytest.mark.parametrize("method", METHODS)
def test_the_environment_variable_replaces_both_classes(method, runner, monkeypatch):
    before = dict(vars(runner))
    monkeypatch.setenv(integrations.VLLM_SWITCH, method)
    for _ in range(2):  # plug-ins may be loaded twice
        integrations.register_vllm()
    assert runner.Sampler.__mro__[1:3] == (TokenSampling, before["Sampler"])
    assert runner.RejectionSampler.__bases__ == (DraftVerification, before["RejectionSampler"])
    assert runner.GPUModelRunner.__bases__ == (AdvisedRunner, GrammarSteps, before["GPUModelRunner"])
    assert runner.StructuredOutputsWorker.__bases__ == (KeptGrammars, before["StructuredOutputsWorker"])
    assert runner.Sampler.keeps_grammars
    assert runner.Sampler.verifier.method == runner.RejectionSampler.verifier.method == method
    assert runner.Sampler.unknown is runner.RejectionSampler.unknown is None


def test_another_value_is_an_error_that_names_the_variable(runner, monkeypatch):
    monkeypatch.setenv(integrations.VLLM_SWITCH, "synthetic")
    with pytest.raises(
        ValueError, match=r"SPECDECODE_VLLM: expected one of 'probabilistic', 'block', 'strict'.*'synthetic'"
    ):
        integrations.register_vllm()


@pytest.mark.parametrize("name", ["_verify", "_verify_in_chunks", "_get_logprobs_tensors"])
def test_a_vllm_whose_methods_take_other_arguments_is_refused(name, runner):
    setattr(runner.RejectionSampler, name, lambda self, logits, surprise: None)
    with pytest.raises(ImportError, match=r"expected to take .* as in version 0.33, got .*surprise"):
        vllm.install("strict")
    assert not issubclass(runner.Sampler, TokenSampling)


@pytest.mark.parametrize(
    ("of", "name"), [("RejectionSampler", "_verify"), ("Sampler", "apply_sampling_params"), ("Sampler", "sample")]
)
def test_a_method_that_consults_an_unknown_name_leaves_all_steps_to_vllm(of, name, runner):
    def wider(self, *arguments):
        return self.acceptance_bonus

    kind = getattr(runner, of)
    wider.__name__, wider.__signature__ = name, inspect.signature(getattr(kind, name))
    setattr(kind, name, wider)
    vllm.install("strict")
    for replaced in (runner.Sampler, runner.RejectionSampler):
        assert replaced.unknown.startswith("what vLLM ")
        assert replaced.unknown.endswith(" has and this version of specdecode does not know (acceptance_bonus)")


def test_grammars_are_vllms_if_its_method_consults_an_unknown_name(runner):
    def apply_grammar_bitmask(self, logits, input_batch, grammar_req_ids, grammar_bitmask):
        return self.soft_masks

    runner.StructuredOutputsWorker.apply_grammar_bitmask = apply_grammar_bitmask
    vllm.install("strict")
    assert not runner.Sampler.keeps_grammars
    assert runner.Sampler.unknown is None


def test_an_argument_of_vllms_function_that_is_unknown_leaves_all_steps_to_vllm(runner, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "rejection_sample", lambda target_logits, typical_eps=0.1: None)
    vllm.install("strict")
    assert runner.RejectionSampler.unknown.endswith("(typical_eps)")


@pytest.mark.parametrize("parameter", [{"min_p": 0.1}, {"logit_bias": {3: 1.0}}])
def test_min_p_and_logit_bias_are_served_beside_drafts_by_the_v2_model_runner_alone(parameter, runner):
    vllm.install("strict")
    vllm.install("strict")  # plug-ins may be loaded twice
    params = sys.modules["vllm.sampling_params"].SamplingParams()
    params.__dict__ |= parameter
    for is_v2 in (True, False):
        config = Namespace(speculative_config=Namespace(), use_v2_model_runner=is_v2)
        with pytest.raises(ValueError, match="not yet supported"):  # no engine has this configuration yet
            params._validate_spec_decode(config.speculative_config)
        sys.modules["vllm.v1.engine.input_processor"].InputProcessor(config)
        if is_v2:
            params._validate_spec_decode(config.speculative_config)
        else:
            with pytest.raises(ValueError, match="not yet supported"):
                params._validate_spec_decode(config.speculative_config)
    params._validate_spec_decode(None)


def test_what_else_vllm_refuses_beside_drafts_is_still_refused(runner, caplog):
    def _validate_spec_decode(self, speculative_config):
        if self.typical_p or self.min_p:
            raise ValueError("not yet supported")

    parameters = sys.modules["vllm.sampling_params"].SamplingParams
    parameters._validate_spec_decode = _validate_spec_decode
    vllm.install("strict")
    assert parameters._validate_spec_decode is _validate_spec_decode
    assert "min_p and logit_bias are refused as before" in caplog.text
    assert caplog.messages[0].endswith("typical_p)")


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        (INTERVAL, "soon", "a number of seconds, 0 for no lines"),
        (INTERVAL, "-1", "a number of seconds, 0 for no lines"),
        (INTERVAL, "nan", "a number of seconds, 0 for no lines"),
    ],
)
def test_a_wrong_value_of_another_variable_stops_the_process_too(variable, value, expected, runner, monkeypatch):
    monkeypatch.setenv(integrations.VLLM_SWITCH, "strict")
    monkeypatch.setenv(variable, value)
    before = dict(vars(runner))
    with pytest.raises(ValueError, match=f"{variable}: expected {expected}, got '{value}'"):
        integrations.register_vllm()
    assert vars(runner) == before
