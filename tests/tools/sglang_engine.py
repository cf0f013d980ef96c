"""SGLang's engine with both verifications, for `check_engine`.

It makes random models, unless `--target DIR --draft-model DIR` names others. One more comparison is

- `time`: tokens per second of both, measured as in `tests.benchmarks.serving`: a few steps with one, the same number with
  the other, in one run; and the time of `eagle_sample` on the host and the device.

A step that this package left to SGLang is an error.

SGLang's scheduler is a separate process. It loads this file as a plug-in, by an entry point that `write_plugin` makes. A
small file, `Control`, selects the verification. The variable `SPECDECODE_CHECK_SGLANG` names that file; without it
nothing is changed.
"""

import argparse
import faulthandler
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.serving import (
    ORDER,
    SAMPLING,
    SKIPPED,
    STRETCH,
    compared,
    in_process,
    random_models,
)
from tests.tools.check_engine import OURS, RUNNING, Results, Served, Texts, parts_at, prompts_of

VARIABLE = "SPECDECODE_CHECK_SGLANG"
_, SGLANG, IN_TURN = MODES = OURS, "sglang", "in turn"
FIELDS = "mode", "held", "asked"
HOLD, PATIENCE = 15, 120
"""The most seconds that a prefill waits, and that the engine may take for one call."""
DRAFTS = {"standalone": "STANDALONE", "eagle": "EAGLE"}
MOST_TOKENS, PORT = 640, 31_000
"""The average tokens of each request, and the port of the engine."""
GRAPHS = 1, 2, 4, 8, 16, 32, 64, 128, 192, 256
"""The batch sizes with CUDA graphs."""
SIZES = 151_936, 1024, 8
"""Tokens, width and layers of the random target."""
CASES = dict(list(SAMPLING.items())[:3])
ROUNDS, LONG = 3, 512
"""For timing: the number of times that requests are served, and the tokens of each."""


def write_plugin(folder: Path) -> None:
    """Write the entry point by which SGLang finds this file if the folder is on the path, without installation."""
    info = folder / "check_sglang-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: check-sglang\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\ncheck_sglang = {__name__}:register\n")


class Control:
    """A file in memory through which processes share a few integers.

    | field | meaning |
    |---|---|
    | `mode` | the index in `MODES` of the verification |
    | `held` | requests that a prefill waits for, so that batches are the same in every run; 0 after its start |
    | `asked` | the number of requested reports; the scheduler writes the latest beside the file |
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = 4 * len(FIELDS)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), size)

    def __getitem__(self, field: str) -> int:
        value: int = struct.unpack_from("i", self.memory, 4 * FIELDS.index(field))[0]
        return value

    def __setitem__(self, field: str, value: int) -> None:
        struct.pack_into("i", self.memory, 4 * FIELDS.index(field), value)

    def report(self, number: int) -> Path:
        """Return the path of a report."""
        return self.path.with_suffix(f".{number}")


class Switch:
    """Verifies by the method in the control file, and times steps that are verified in turn."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.steps: list[dict[str, Any]] = []
        self.verified: Counter[str] = Counter()
        self.answered = 0

    def __call__(self, hook: Any, ours: Any, original: Any, *args: Any, **options: Any) -> Any:
        """Verify a step.

        Args:
            hook: this package's hook, which counts the steps left to SGLang.
            ours: the hook's call.
            original: SGLang's function.
            *args: the drafts, the batch, the logits and the rest, of SGLang's function.
            **options: keyword arguments of SGLang's function.
        """
        if args[1].forward_mode.is_idle():
            return original(*args, **options)
        if self.control["asked"] != self.answered:
            self.answer(hook)
        mode = MODES[self.control["mode"]]
        if mode == IN_TURN:
            return self.timed(hook, ours, original, *args, **options)
        self.verified[mode] += 1
        return ours(hook, original, *args, **options) if mode == OURS else original(*args, **options)

    def timed(self, hook: Any, ours: Any, original: Any, *args: Any, **options: Any) -> Any:
        """Verify a step by the verification whose turn it is, and record the time on the host and on the device."""
        import torch

        stretch, mode = turn(len(self.steps))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        result = ours(hook, original, *args, **options) if mode == OURS else original(*args, **options)
        end.record()
        host = 1e6 * (time.perf_counter() - began)
        step = {"mode": mode, "stretch": stretch, "start": began, "verify_host_us": host}
        self.verified[mode] += 1
        self.steps.append(step | {"events": (start, end), "lengths": result[1].clone(), "requests": len(args[1].reqs)})
        return result

    def answer(self, hook: Any) -> None:
        """Write a report: all steps that were timed since the last, and counts since the engine was started."""
        import torch

        torch.cuda.synchronize()
        self.answered = self.control["asked"]
        for step in self.steps:
            start, end = step.pop("events")
            step["verify_device_us"] = 1e3 * start.elapsed_time(end)
            step["emitted"] = int(step.pop("lengths").sum())
        report = {"steps": self.steps, "verified": self.verified, "fallbacks": hook.fallbacks}
        path = self.control.report(self.answered)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(report))
        unfinished.rename(path)
        self.steps = []


def turn(step: int) -> tuple[int, str]:
    """Return the stretch of a step, and its verification.

    >>> [turn(step)[1] for step in (0, 5, 6, 17, 18, 24, 30)]
    ['ours', 'ours', 'sglang', 'sglang', 'ours', 'ours', 'sglang']
    """
    stretch = step // STRETCH
    return stretch, OURS if ORDER[stretch % len(ORDER)] == OURS else SGLANG


def counted(steps: list[dict[str, Any]], requests: int) -> list[dict[str, Any]]:
    """Return the steps of a report that count: steps of all requests, followed by another, except the first of each stretch.

    `step_us` is the time from the beginning of one verification to the beginning of the next.
    """
    result, of_stretch = [], 0
    for last, step, following in zip([{"stretch": -1}, *steps], steps, steps[1:]):
        of_stretch = of_stretch + 1 if step["stretch"] == last["stretch"] else 0
        if of_stretch >= SKIPPED and step["requests"] == following["requests"] == requests:
            result.append(step | {"step_us": 1e6 * (following["start"] - step["start"])})
    return result


class Hold:
    """Delays each prefill until the number of requests in the control file wait."""

    def __init__(self, control: Control) -> None:
        self.control, self.began = control, 0.0

    def __call__(
        self, original: Callable[..., Any], scheduler: Any, running_batch: Any, *args: Any, **options: Any
    ) -> Any:
        """Stand in for `Scheduler.get_new_batch_prefill`."""
        waiting, wanted = len(scheduler.waiting_queue), self.control["held"]
        if wanted:
            self.began = self.began or time.monotonic()
            late = time.monotonic() - self.began >= HOLD
            if waiting < wanted and not late:
                from sglang.srt.managers.scheduler import NextBatchPlan

                return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
            if late:
                print(
                    f"after {HOLD} s only {waiting} of {wanted} requests wait: batches may differ between runs",
                    flush=True,
                )
            self.control["held"], self.began = 0, 0.0
        return original(scheduler, running_batch, *args, **options)


def register() -> None:
    """Wrap this package's hook in the switch, and SGLang's scheduler in the hold: the entry point."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from specdecode.integrations.sglang import EagleSample

    control = Control(Path(path))
    switch, ours = Switch(control), EagleSample.__call__

    def verify(hook: Any, original: Any, *args: Any, **options: Any) -> Any:
        return switch(hook, ours, original, *args, **options)

    EagleSample.__call__ = verify  # type: ignore[assignment, method-assign]  # plug-ins are loaded in any order
    target = "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill"
    HookRegistry.register(target, Hold(control), HookType.AROUND)


# ---- Outside of SGLang -----------------------------------------------------------------------------------------------


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `sgl.Engine`, except the models."""
    running = max(RUNNING, *options.requests)
    topk, nodes = options.tree or (1, options.num_draft_tokens + 1)
    return {
        "speculative_algorithm": DRAFTS[options.draft],
        "speculative_num_steps": options.num_draft_tokens,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
        "speculative_use_rejection_sampling": options.drawn,
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "json_model_override_args": '{"enable_lm_head_output_fp32": true}',  # bfloat16 logits have ties
        "context_length": 2048,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "disable_flashinfer_autotune": True,
        "cuda_graph_bs_decode": sorted({*GRAPHS, *options.requests}),
        "cuda_graph_max_bs_decode": running,
        "max_running_requests": running,
        "max_total_tokens": running * MOST_TOKENS,
        "chunked_prefill_size": 16_384,
        "max_prefill_tokens": 16_384,
        "mem_fraction_static": 0.6,
        "random_seed": 1,
        "watchdog_timeout": PATIENCE + 30,
        "log_level": "warning",
        "port": PORT,
        "nccl_port": PORT + 57,
    }


class SwitchedEngine:
    """An engine of SGLang, and the control file of its scheduler."""

    name, tokens = SGLANG, 96

    def __init__(self, options: argparse.Namespace, directory: TemporaryDirectory[str]) -> None:
        import sglang

        self.directory, self.control = directory, Control(Path(directory.name) / "control")
        self.repeats, self.samples, self.requests = not options.drawn, options.samples, options.requests
        self.engine = sglang.Engine(
            model_path=str(options.target),
            speculative_draft_model_path=str(options.draft_model),
            **engine_arguments(options),
        )

    def serve(self, mode: str, prompts: Texts, sampling: dict[str, Any], tokens: int, held: bool = False) -> Served:
        """Serve requests under one verification, see `check_engine.Engine`; the mode may be `IN_TURN`, too."""
        self.control["mode"], self.control["held"] = MODES.index(mode), len(prompts) * held
        params = [sampling | {"max_new_tokens": tokens, "ignore_eos": True} for _ in prompts]
        timer = threading.Timer(PATIENCE, self.give_up)
        timer.daemon = True
        timer.start()
        try:
            results = self.engine.generate(input_ids=[list(prompt) for prompt in prompts], sampling_params=params)
        finally:
            timer.cancel()
            self.control["held"] = 0
        return Served([each["output_ids"] for each in results], {"acceptance length": acceptance_length(results)})

    def samplings(self) -> dict[str, dict[str, Any]]:
        """Return the kinds of requests whose tokens are compared."""
        return dict(list(CASES.items())[1:])

    def gaps(self, prompts: Texts, texts: Texts, others: Texts) -> list[Any]:
        """Return the first different index of each pair of different texts."""
        return [parts_at(text, other) for text, other in zip(texts, others) if text != other]

    def errors(self) -> list[str]:
        """Return errors for steps left to SGLang, and for a verification without steps."""
        report = self.report()
        errors = [f"{count} steps left to SGLang: {reason}" for reason, count in report["fallbacks"].items()]
        return errors + [f"{mode}: no step verified" for mode in (OURS, SGLANG) if not report["verified"].get(mode)]

    def report(self) -> dict[str, Any]:
        """Return the results since the last report, which the scheduler writes at its next verification."""
        self.control["asked"] += 1
        path = self.control.report(self.control["asked"])
        self.serve(OURS, [[5] * 8], {"temperature": 0.0}, 6)
        until = time.monotonic() + 5
        while not path.exists():
            if time.monotonic() > until:
                raise RuntimeError(
                    "SGLang has not called the plug-ins: is specdecode installed? does SGLANG_PLUGINS say so?"
                )
            time.sleep(0.05)
        result: dict[str, Any] = json.loads(path.read_text())
        return result

    def give_up(self) -> None:
        """End all processes."""
        print(f"the engine has not answered for {PATIENCE} s", flush=True)
        faulthandler.dump_traceback()
        self.directory.cleanup()
        self.close(1)
        os._exit(1)

    def close(self, status: int) -> None:
        """End SGLang's processes; if they or threads of this process do not end, end this process with the status."""
        timer = threading.Timer(20, os._exit, [status])
        timer.daemon = True
        timer.start()
        self.engine.shutdown()


def acceptance_length(results: list[Any]) -> float:
    """Return the mean number of tokens that a verification emits."""
    tokens, steps = (sum(each["meta_info"][key] for each in results) for key in ("completion_tokens", "spec_verify_ct"))
    return float(round(tokens / steps, 3))


def timed(engine: SwitchedEngine) -> Results:
    """Measure both in turn: medians of each, and the ratio of tokens per second with its interval."""
    for requests in engine.requests:
        for name, sampling in CASES.items():
            prompts, steps = prompts_of(requests), list[dict[str, Any]]()
            for mode in (OURS, SGLANG):
                engine.serve(mode, prompts, sampling, 24, held=True)
            for i in range(ROUNDS):
                engine.serve(IN_TURN, prompts, sampling, LONG, held=True)
                own = counted(engine.report()["steps"], requests)
                steps += [step | {"stretch": step["stretch"] + 1000 * i} for step in own]
            yield f"{requests} requests, {name}", {"requests": requests} | compared(steps, peer=SGLANG)


COMPARISONS = {"time": timed}


# ---- A run -----------------------------------------------------------------------------------------------------------


def models(folder: Path, draft: str) -> tuple[Path, Path]:
    """Write a random target, and a draft that partly agrees with it."""
    target, standalone = random_models(folder, *SIZES)
    return target, standalone if draft == "standalone" else eagle_head(standalone, folder / "eagle")


def eagle_head(draft: Path, folder: Path) -> Path:
    """Write a standalone draft as an EAGLE head, which has its embeddings and output from the target.

    The head has no norm before its first attention and none before its output. Both are folded into its weights: hidden
    states are `scale` times the draft's, which makes the last ones as large as a norm would. It ignores the target's.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(draft, dtype=torch.bfloat16).to("cuda")
    config = json.loads((draft / "config.json").read_text())
    ids = torch.randint(2, min(1000, config["vocab_size"]), (8, 64), device="cuda")
    last = []
    model.model.norm.register_forward_hook(lambda module, inputs, output: last.append(inputs[0].float()))
    with torch.no_grad():
        model.model(ids)
        embedded = model.model.embed_tokens(ids).float().pow(2).mean().sqrt().item()
    scale = 1 / last[0].pow(2).mean().sqrt().item()
    state = {}
    for name, value in load_file(draft / "model.safetensors").items():
        if not name.startswith("model.layers.") or name == "model.layers.0.input_layernorm.weight":
            continue
        factor = scale if "o_proj" in name or "down_proj" in name else 1.0
        if name.startswith("model.layers.0.self_attn") and "o_proj" not in name:
            factor = 1 / (scale * embedded)
        state[name.removeprefix("model.")] = (value.float() * factor).bfloat16().contiguous()
    width = config["hidden_size"]
    state["fc.weight"] = torch.cat([scale * torch.eye(width), torch.zeros(width, width)], 1).bfloat16()
    state["fc.bias"] = torch.zeros(width).bfloat16()
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLMEagle"]}))
    return folder


def default_comparisons() -> list[str]:
    """Return the default comparisons."""
    return ["greedy", "tokens"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of an engine of SGLang."""
    parser.add_argument("--draft", choices=DRAFTS, required=True)
    parser.add_argument("--drawn", action="store_true", help="draw drafts, by an EAGLE head: rejection sampling")
    parser.add_argument("--method", choices=("probabilistic", "strict", "block"), default="probabilistic")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="drafts of a request; the depth of a tree")
    parser.add_argument("--tree", type=int, nargs=2, metavar=("TOPK", "NODES"), help="verify trees, such as 4 12")
    parser.add_argument("--requests", type=int, nargs="+", default=(1, 32, 256), help="of what is timed")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft-model", type=Path, help="beside --target")


def start(options: argparse.Namespace) -> SwitchedEngine:
    """Start an engine whose processes find the plug-in."""
    if options.drawn and options.draft == "standalone":
        raise SystemExit("--drawn: expected --draft eagle, SGLang draws no others")
    if options.drawn and options.tree:
        raise SystemExit("--tree: expected no --drawn, SGLang draws no trees")
    if (options.target is None) != (options.draft_model is None):
        raise SystemExit("--target, --draft-model: expected both or neither")
    directory = TemporaryDirectory()
    folder = Path(directory.name)
    if options.target is None:
        options.target, options.draft_model = in_process(models, folder, options.draft)
    (folder / "plug-in").mkdir()
    write_plugin(folder / "plug-in")
    paths = [str(folder / "plug-in"), os.getcwd()]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, paths[0])  # SGLang's processes are given this process's path
    os.environ |= {"SPECDECODE_SGLANG": options.method, VARIABLE: str(folder / "control")}
    engine = SwitchedEngine(options, directory)
    try:
        engine.report()  # raises an error if the plug-ins do not work
    except RuntimeError:
        engine.close(1)
        raise
    return engine
