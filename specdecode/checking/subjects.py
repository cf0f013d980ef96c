"""Ready-made subjects: this package's methods, and the verifiers of other projects that are installed.

Each is called as its own project calls it. Where the project takes another path, such as for greedy decoding, the subject
raises a ValueError, and the report says so.
"""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from specdecode.checking.lossy import RULES
from specdecode.checking.subject import given_drafts
from specdecode.checking.trees import depths

Function = Callable[..., Any]


class Loaded(NamedTuple):
    """A verifier, its drafter or None, and its name in the report."""

    verify: Function
    draft: Function | None
    name: str
    tree: Function | None = None
    """A verifier of trees, or None."""


def load(name: str, files: dict[Path, ModuleType] | None = None) -> Loaded:
    """Return a subject by its name, or a function of a file by `file.py:function`.

    Args:
        name: the name of a subject, with options after colons, or `file.py:function`.
        files: the modules of files that were run before; a file is run only once, so its functions share its variables.

    Raises:
        ValueError: an unknown name, or a project that is not installed.
    """
    if name.rpartition(":")[0].endswith(".py"):
        function = load_function("subject", name, {} if files is None else files)
        return Loaded(function, None, name, function)
    first, *options = name.split(":")
    loaders = {**SUBJECTS, **RULES}
    if first not in loaders:
        raise ValueError(f"subject: expected file.py:function, or one of {', '.join(loaders)}, got {name!r}")
    parameters = inspect.signature(loaders[first])
    usage = ":".join([first, *(f"[{each}]" for each in parameters.parameters)])
    try:
        parameters.bind(*options)
        numbers = [int(each) if each.isdigit() else float(each) for each in options] if first in RULES else []
    except (TypeError, ValueError):  # too many options, or no number
        raise ValueError(f"subject: expected {usage}, got {name!r}") from None
    if first in RULES:
        return Loaded(RULES[first](*numbers), None, name)
    try:
        return SUBJECTS[first](*options)
    except ImportError as error:
        raise ValueError(f"subject: expected one whose project is installed, got {name!r}: {error}") from error


def load_function(argument: str, name: str, files: dict[Path, ModuleType]) -> Function:
    """Run a file, if it has not been run before, and return one of its functions, by `file.py:function`."""
    path, _, function_name = name.rpartition(":")
    file = Path(path)
    if not path.endswith(".py") or not file.is_file():
        raise ValueError(f"{argument}: expected file.py:function and a file that exists, got {name!r}")
    if file not in files:
        files[file] = run_file(argument, file)
    function: Function | None = getattr(files[file], function_name, None)
    if not callable(function):
        functions = [each for each, value in vars(files[file]).items() if callable(value)]
        close = "".join(f". Do you mean {each!r}?" for each in get_close_matches(function_name, functions, 1))
        raise ValueError(
            f"{argument}: expected a function of {file}, got {function_name!r}, which it does not have{close}"
        )
    return function


def run_file(argument: str, file: Path) -> ModuleType:
    """Run a file as a module that can import the files beside it."""
    sys.path.insert(0, str(file.parent.resolve()))
    specification = importlib.util.spec_from_file_location(f"checked_{file.stem}", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file can raise anything
        raise ValueError(f"{argument}: {file} raised {type(error).__name__}: {error}") from error
    return module


def require(condition: bool, message: str) -> None:
    """Raise a ValueError unless a condition holds."""
    if not condition:
        raise ValueError(message)


def require_method(project: str, method: str) -> None:
    """Raise a ValueError unless the method is one of an engine's two."""
    expected = f"{project}, {project}:standard or {project}:block"
    require(method in ("standard", "block"), f"subject: expected {expected}, got {project}:{method}")


def require_full_chains(draft_token_ids: Any, draft_logits: Any, temperature: float) -> None:
    """Raise a ValueError unless each position of each request has a draft with probabilities."""
    require(draft_logits is not None, "this function needs draft probabilities")
    require(temperature > 0, "this function takes probabilities, and no temperature 0")
    require(bool((draft_token_ids >= 0).all()), "this function needs a draft at every position of every request")


# --- This package ------------------------------------------------------------------------------------------------------


def specdecode(method: str = "probabilistic", backend: str = "auto") -> Loaded:
    """`RejectionSampler(method, backend)` with drafts of its own `draft`."""
    import torch

    from specdecode import RejectionSampler, __version__

    sampler = RejectionSampler(method, backend=backend)  # type: ignore[arg-type]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def tensor(value: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(value)).to(device) if isinstance(value, np.ndarray) else value

    def with_tensors(function: Function) -> Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            values = {name: tensor(value) for name, value in options.items()}
            return function(*map(tensor, arguments), **values).token_ids

        return call

    @with_tensors
    def verify(
        target_logits: Any, draft_token_ids: Any, draft_logits: Any, *, temperature: float, seeds: Any, positions: Any
    ) -> Any:
        draft = draft_logits if draft_token_ids.shape[1] else None  # [n, 0, vocab] without drafts
        return sampler(target_logits, draft_token_ids, draft, temperature=temperature, seeds=seeds, positions=positions)

    @with_tensors
    def draft(draft_logits: Any, *, temperature: float, seeds: Any, positions: Any, offset: int) -> Any:
        return sampler.draft(draft_logits, temperature=temperature, seeds=seeds, positions=positions, offset=offset)

    @with_tensors
    def tree(
        target_logits: Any, token_ids: Any, parents: Any, *, temperature: float, seeds: Any, positions: Any
    ) -> Any:
        options: dict[str, Any] = {"max_depth": max(depths(parents.tolist())), "temperature": temperature}
        return sampler.tree(target_logits, token_ids, parents, seeds=seeds, positions=positions, **options)

    name = f"specdecode {__version__} {method}, {backend}, {device}"
    return Loaded(verify, draft, name, tree if method == "strict" else None)


# --- transformers ------------------------------------------------------------------------------------------------------


def transformers() -> Loaded:
    """The function that `generate` calls for each text when it samples and the assistant returns logits."""
    import torch

    speculative_sampling = import_module("transformers.generation.utils")._speculative_sampling

    def verify(target_logits: Any, draft_token_ids: Any, draft_logits: Any, *, temperature: float) -> Any:
        require(draft_logits is not None, "without draft logits generate samples and compares, in its own loop")
        require(temperature > 0, "greedy decoding is in generate's own loop")
        given = given_drafts(draft_token_ids)
        require(bool((given > 0).all()), "without drafts generate samples, in its own loop")
        token_ids = np.full((len(target_logits), target_logits.shape[1]), -1)
        # `generate`'s logits processors have divided the logits of both models by the temperature.
        target, draft = (torch.from_numpy(logits / np.float32(temperature)) for logits in (target_logits, draft_logits))
        tokens = torch.from_numpy(draft_token_ids)
        for request, count in enumerate(given.tolist()):
            rows = target[request : request + 1, : count + 1], draft[request : request + 1, :count]
            valid, _ = speculative_sampling(tokens[request : request + 1, :count], rows[1], count, rows[0])
            token_ids[request, : valid.shape[1]] = valid[0].numpy()
        return token_ids

    return Loaded(verify, None, f"transformers {version('transformers')} _speculative_sampling")


# --- Serving engines: they need a GPU ----------------------------------------------------------------------------------


def vllm(method: str = "standard") -> Loaded:
    """Verification of packed rows by vLLM's `rejection_sample`; `vllm:block` is its block verification."""
    import torch

    require_method("vllm", method)
    module = import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")

    def verify(
        target_logits: Any, draft_token_ids: Any, draft_logits: Any, *, temperature: float, seeds: Any, positions: Any
    ) -> Any:
        requests, num_drafts = draft_token_ids.shape
        given = given_drafts(draft_token_ids)
        slots, offsets = np.nonzero(np.arange(num_drafts + 1) <= given[:, None])
        fed = np.pad(draft_token_ids, ((0, 0), (1, 0)))[slots, offsets]  # each row's input token; 0 before the drafts

        def on_gpu(array: Any, dtype: Any = None) -> Any:
            return torch.from_numpy(np.ascontiguousarray(array)).to("cuda", dtype)

        rows = on_gpu(target_logits[slots, offsets])
        sampled, counts = module.rejection_sample(
            rows / temperature if temperature > 0 else rows,  # as vLLM's logits processors return them
            None if draft_logits is None or num_drafts == 0 else on_gpu(draft_logits),
            on_gpu(fed),
            on_gpu(np.cumsum([0, *(given + 1)]), torch.int32),
            on_gpu(positions[slots] + offsets),
            on_gpu(np.arange(requests), torch.int32),
            on_gpu(slots, torch.int32),
            on_gpu(offsets, torch.int32),
            torch.full((requests,), temperature, device="cuda"),
            on_gpu(seeds),
            num_drafts,
            use_block_verification=method == "block",
        )
        past = torch.arange(num_drafts + 1, device="cuda") >= counts[:, None]  # the kernel leaves these unwritten
        return sampled.masked_fill(past, -1)

    return Loaded(verify, None, f"vLLM {version('vllm')} rejection_sample, {method}")


def sglang(method: str = "standard") -> Loaded:
    """SGLang's verification of chains with draft probabilities; `sglang:block` is its block verification."""
    import torch

    require_method("sglang", method)
    softmax = import_module("sglang.kernels.ops.sampling").softmax
    verification = import_module("sglang.kernels.ops.speculative.verify_sampling").chain_speculative_sampling_triton

    def verify(target_logits: Any, draft_token_ids: Any, draft_logits: Any, *, temperature: float) -> Any:
        require_full_chains(draft_token_ids, draft_logits, temperature)
        batch, rows = target_logits.shape[:2]

        def probabilities(logits: Any) -> Any:
            flat = torch.from_numpy(logits).cuda().flatten(0, 1)
            temperatures = torch.full((len(flat), 1), temperature, device="cuda")
            return softmax(flat, temperatures).view(logits.shape)

        predicts = torch.zeros(batch * rows, dtype=torch.int32, device="cuda")
        index = torch.full((batch, rows), -1, dtype=torch.int32, device="cuda")
        accepted = torch.empty(batch, dtype=torch.int32, device="cuda")
        verification(
            predicts=predicts,
            accept_index=index,
            accept_token_num=accepted,
            candidates=torch.nn.functional.pad(torch.from_numpy(draft_token_ids), (1, 0)).cuda(),
            retrive_index=torch.arange(batch * rows, device="cuda").view(batch, rows),
            retrive_next_token=None,
            retrive_next_sibling=None,
            uniform_samples=torch.rand(batch, rows, device="cuda"),
            uniform_samples_for_final_sampling=torch.rand(batch, device="cuda"),
            target_probs=probabilities(target_logits),
            draft_probs=probabilities(draft_logits),
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
            **({"block_verification": True} if method == "block" else {}),
        )
        emitted = torch.arange(rows, device="cuda") <= accepted[:, None]
        return torch.where(emitted, predicts[index.clamp(min=0).long()].long(), -1)

    return Loaded(verify, None, f"SGLang {version('sglang')} chain_speculative_sampling_triton, {method}")


def flashinfer() -> Loaded:
    """FlashInfer's verification of chains with draft probabilities."""
    import torch

    sampling = import_module("flashinfer.sampling")

    def verify(target_logits: Any, draft_token_ids: Any, draft_logits: Any, *, temperature: float) -> Any:
        require_full_chains(draft_token_ids, draft_logits, temperature)

        def probabilities(logits: Any) -> Any:
            return sampling.softmax(torch.from_numpy(logits).cuda().flatten(0, 1), temperature).view(logits.shape)

        tokens = torch.from_numpy(draft_token_ids).to("cuda", torch.int32)
        output = sampling.chain_speculative_sampling(probabilities(draft_logits), tokens, probabilities(target_logits))
        return output[0]

    return Loaded(verify, None, f"FlashInfer {version('flashinfer-python')} chain_speculative_sampling")


SUBJECTS: dict[str, Callable[..., Loaded]] = {
    "specdecode": specdecode, "transformers": transformers, "vllm": vllm, "sglang": sglang, "flashinfer": flashinfer,
}  # fmt: skip
