"""The plug-in in each process of vLLM: it replaces the sampler's classes, and lifts a restriction."""

import functools
import importlib
from typing import Any

from specdecode import RejectionSampler
from specdecode.integrations.engine import EngineMethod, log_interval
from specdecode.integrations.vllm.compat import (
    INTERVAL,
    RUNNER,
    as_reason,
    check_same_arguments,
    group_of,
    logger,
    unknown_names,
)
from specdecode.integrations.vllm.grammars import GrammarSteps, KeptGrammars
from specdecode.integrations.vllm.sampling import TokenSampling
from specdecode.integrations.vllm.verification import DraftVerification

SERVED = "_specdecode_serves_all_parameters"
"""The attribute of vLLM's speculative configuration that marks engines with the restriction lifted."""

GATHERED = (
    "specdecode: vLLM gathers the logits of all requests on each of %d GPUs; --enable-batch-sharded-sampling saves the "
    "gather: each GPU then verifies its own requests"
)


class AdvisedRunner:
    """Mixed into vLLM's V2 model runner: it logs vLLM's flag that saves the gather of logits, where there is a gather."""

    # What vLLM's class has:
    model: Any
    rejection_sampler: Any
    sampler: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, with vLLM's arguments."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        group, reports = group_of(self.sampler), getattr(self.rejection_sampler, "metrics", None) is not None
        # Without this method of the model, vLLM gathers despite the flag.
        can_shard = hasattr(self.model, "compute_logits_local")
        if reports and can_shard and group is not None and group.world_size > 1:
            logger.info(GATHERED, group.world_size)


def install(method: EngineMethod) -> None:
    """Replace the sampler classes of vLLM's V2 model runner.

    Engines created afterwards in this process verify by this method. `SPECDECODE_VLLM` calls this in every process of
    vLLM; call it yourself only if vLLM runs in one process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`).

    Requests with `min_p` or `logit_bias`, which vLLM refuses together with drafts, are then accepted, if the V2 model
    runner serves them.

    Args:
        method: `"probabilistic"`, `"block"` or `"strict"`.

    Raises:
        ImportError: vLLM is not installed, or its classes take other arguments.
        ValueError: `SPECDECODE_VLLM_LOG_INTERVAL` has a wrong value.
    """
    log_interval(INTERVAL)  # a wrong value raises before anything is replaced
    runner: Any = importlib.import_module(RUNNER)
    if issubclass(runner.RejectionSampler, DraftVerification):
        runner.RejectionSampler.verifier = runner.Sampler.verifier = RejectionSampler(method)
        return
    replaced = [
        (TokenSampling, runner.Sampler, "sample"),
        (DraftVerification, runner.RejectionSampler, "_verify"),
        (DraftVerification, runner.RejectionSampler, "_verify_in_chunks"),
        (DraftVerification, runner.RejectionSampler, "_get_logprobs_tensors"),
        (GrammarSteps, runner.GPUModelRunner, "sample"),
        (KeptGrammars, runner.StructuredOutputsWorker, "apply_grammar_bitmask"),
    ]
    for ours, theirs, name in replaced:
        check_same_arguments(getattr(ours, name), getattr(theirs, name))
    members = {"verifier": RejectionSampler(method), "unknown": as_reason(unknown_rules(runner))}
    keeps = {"keeps_grammars": not unknown_names(runner.StructuredOutputsWorker.apply_grammar_bitmask)}
    runner.Sampler = type("Sampler", (TokenSampling, runner.Sampler), members | keeps)
    runner.RejectionSampler = type("RejectionSampler", (DraftVerification, runner.RejectionSampler), dict(members))
    runner.GPUModelRunner = type("GPUModelRunner", (AdvisedRunner, GrammarSteps, runner.GPUModelRunner), {})
    worker = KeptGrammars, runner.StructuredOutputsWorker
    runner.StructuredOutputsWorker = type("StructuredOutputsWorker", worker, {})
    lift_refusal()


def unknown_rules(runner: Any) -> list[str]:
    """Return the unknown names in the methods of vLLM that are replaced here."""
    states = importlib.import_module("vllm.v1.worker.gpu.sample.states").SamplingStates
    methods = [getattr(runner.RejectionSampler, name) for name in ("_verify", "_get_logprobs_tensors")]
    methods += [runner.Sampler.apply_sampling_params, runner.Sampler.sample, states.add_request]
    return [name for method in methods for name in unknown_names(method)]


def lift_refusal() -> None:
    """Make vLLM accept `min_p` and `logit_bias` together with drafts.

    vLLM refuses them because its older model runner ignores them for drafts. This package and the V2 model runner apply
    them to every row.
    """
    parameters: Any = importlib.import_module("vllm.sampling_params").SamplingParams
    processor: Any = importlib.import_module("vllm.v1.engine.input_processor").InputProcessor
    refuse, begin = parameters._validate_spec_decode, processor.__init__
    if new := unknown_names(refuse):
        logger.warning("specdecode: min_p and logit_bias are refused as before, because of %s", as_reason(new))
        return

    @functools.wraps(refuse)
    def validate(self: Any, speculative_config: Any) -> None:
        if not getattr(speculative_config, SERVED, False):
            refuse(self, speculative_config)

    @functools.wraps(begin)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        config = self.vllm_config
        if config.speculative_config is not None and config.use_v2_model_runner:
            object.__setattr__(config.speculative_config, SERVED, True)

    parameters._validate_spec_decode, processor.__init__ = validate, initialise
