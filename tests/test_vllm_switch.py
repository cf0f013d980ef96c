"""An environment variable lets vLLM verify with this package; without it nothing is touched."""

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest

from specdecode.integrations import engines, vllm
from specdecode.integrations.vllm import RUNNER, DraftVerification, TokenSampling
from tests.test_vllm import METHODS, PlainRejectionSampler


@pytest.fixture
def runner(monkeypatch):
    """A module in the place of vLLM's model runner."""

    class Sampler:
        sample = TokenSampling.sample

    class RejectionSampler(PlainRejectionSampler):
        _verify = DraftVerification._verify

    module = Namespace(Sampler=Sampler, RejectionSampler=RejectionSampler)
    monkeypatch.setitem(sys.modules, RUNNER, module)
    for parent in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
        monkeypatch.setitem(sys.modules, parent, Namespace(__path__=[]))
    return module


@pytest.mark.parametrize("value", [None, ""])
def test_nothing_is_touched_without_the_environment_variable(value, runner, monkeypatch):
    monkeypatch.delenv(engines.VLLM_SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(engines.VLLM_SWITCH, value)
    before = dict(vars(runner))
    engines.register_vllm()
    assert vars(runner) == before


def test_the_entry_points_exist_and_cost_no_import():
    root = Path(__file__).parent.parent
    if not (root / "pyproject.toml").exists():
        pytest.skip("not in a checkout")
    groups = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        module, _, function = groups[group]["specdecode"].partition(":")
        assert callable(getattr(import_module(module), function))
    code = "import sys, specdecode.integrations.engines; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


@pytest.mark.parametrize("method", METHODS)
def test_the_environment_variable_replaces_both_classes(method, runner, monkeypatch):
    before = dict(vars(runner))
    monkeypatch.setenv(engines.VLLM_SWITCH, method)
    for _ in range(2):  # plug-ins may be loaded twice
        engines.register_vllm()
    assert runner.Sampler.__mro__[1:3] == (TokenSampling, before["Sampler"])
    assert runner.RejectionSampler.__mro__[1:3] == (DraftVerification, before["RejectionSampler"])
    assert runner.Sampler.verifier.method == runner.RejectionSampler.verifier.method == method


def test_another_value_is_an_error_that_names_the_variable(runner, monkeypatch):
    monkeypatch.setenv(engines.VLLM_SWITCH, "synthetic")
    with pytest.raises(
        ValueError, match=r"SPECDECODE_VLLM: expected one of 'probabilistic', 'block', 'strict'.*'synthetic'"
    ):
        engines.register_vllm()


def test_a_vllm_whose_methods_take_other_arguments_is_refused(runner):
    runner.RejectionSampler._verify = lambda self, logits, surprise: None
    with pytest.raises(ImportError, match=r"expected to take .* as in version 0.33, got .*surprise"):
        vllm.install("strict")
    assert not issubclass(runner.Sampler, TokenSampling)
