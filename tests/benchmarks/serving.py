"""Serving by vLLM with its own verification and this package's in turn: tokens per second, and time by kernel.

`python -m tests.benchmarks.serving` in the repository's root, with a GPU, vLLM and this package installed. It makes two
random models that partly agree; `--target DIR --draft DIR` names others. `--record FILE.json` keeps the results.

Prompts are random tokens. For real models `--text FILE ...` takes prompts from texts: pieces of 200 to 400 tokens, spread
evenly over the texts, by the target's tokenizer. Acceptance depends on the prompt, so each cell has at least eight: a single
request is replaced by the next one after an eighth of the steps. Requests do not stop at the end-of-sequence token.

Rounds of one engine differ by more than the two verifications do. So they alternate within a round: a few steps with one,
the same number with the other, in the order ours, vLLM's, vLLM's, ours. The first steps after each change do not count. A
pair is two adjacent stretches, one of each; the ratio's interval (95 %) is Student's t interval for the mean of the
pairs' log-ratios.

Over several GPUs (`--engine '{"tensor_parallel_size": 2}'`) vLLM gathers the logits of all requests on every GPU; with
`--exchange batch-sharded`, each GPU gets the logits of its own requests. Both verifications have the same logits. Results
are of the GPU that verified in most steps, usually the first; `sample` is the head, all exchanges and `_verify`.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STRETCH, SKIPPED = 6, 2
"""The number of steps of one verification before the other's turn, and the number of these that do not count."""
ORDER = "ours", "vllm", "vllm", "ours"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T .8": {"temperature": 0.8},
    "T .8, top-k 20, top-p .95": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "T .8, top-p .95": {"temperature": 0.8, "top_p": 0.95},
    "as Qwen2.5": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},  # its own defaults
    "T .8, min-p .05": {"temperature": 0.8, "min_p": 0.05},  # without the plug-in vLLM refuses it
}
DRAFTERS = "model", "n-gram"
EXCHANGES = "default", "batch-sharded"
"""vLLM's exchange of logits between GPUs: as configured, or to each GPU the logits of its own requests."""
PROMPT, PIECES, TEXTS = 32, (200, 400), 8
"""Tokens of a random prompt; smallest and largest number of tokens of a piece of text; fewest pieces in a cell."""


class Measuring:
    """Mixed into vLLM's worker, to measure in its process."""

    def begin_measuring(self, exchange: str, tokens: int, modes: list[str], stretch: int, profiled: bool) -> None:
        """Measure steps with this number of fed tokens, in which all requests decode and no prompt is processed."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if not hasattr(self, "meter"):
            self.meter = Meter(runner)
        self.meter.begin(exchange, tokens, modes, stretch, profiled)

    def end_measuring(self) -> dict[str, Any]:
        """Return the results of each step that counts, with times in microseconds; and the times of kernels, if profiled."""
        return self.meter.end()


class Meter:
    """Switches verifications between steps, and times them."""

    def __init__(self, runner: Any) -> None:
        self.configured = runner.batch_sharder
        self.runner, self.unmeasured = runner, (runner.execute_model, runner.sample_tokens, runner.sample)
        ours = type(runner.rejection_sampler)
        theirs = next(kind for kind in ours.__mro__ if kind.__module__.startswith("vllm."))
        self.verifications = {"ours": self.timed(ours), "vllm": self.timed(theirs)}

    def begin(self, exchange: str, tokens: int, modes: list[str], stretch: int, profiled: bool) -> None:
        import torch

        self.sharder = self.configured
        if exchange == "batch-sharded" and self.sharder is None:
            self.sharder = sharder_of(self.runner)
        self.tokens, self.modes, self.stretch = tokens, modes, stretch
        self.steps: list[dict[str, Any]] = []
        self.left_before = Counter(self.left())
        self.count = self.profiled = 0
        self.runner.execute_model, self.runner.sample_tokens = self.execute_model, self.sample_tokens
        self.runner.sample = self.sample
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if profiled else None

    def execute_model(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        execute, *_ = self.unmeasured
        if scheduled.total_num_scheduled_tokens == 0:
            return execute(scheduled, *args, **options)
        stretch = self.count // self.stretch
        step = {"mode": self.modes[stretch % len(self.modes)], "stretch": stretch, "verified": [], "sampled": []}
        step["counts"] = scheduled.total_num_scheduled_tokens == self.tokens
        step["preempted"] = len(scheduled.preempted_req_ids or ())
        self.count += step["counts"]
        if self.profiler is not None and self.count > SKIPPED:
            if self.profiled == 0:
                self.profiler.start()
            self.profiled += 1
        self.steps.append(step)
        self.runner.rejection_sampler.__class__ = self.verifications[step["mode"]]
        self.runner.batch_sharder = self.sharder
        step["start"] = time.perf_counter()
        result = execute(scheduled, *args, **options)
        step["executed"] = time.perf_counter()
        return result

    def sample_tokens(self, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = self.unmeasured[1](*args, **options)
        if self.steps:
            self.steps[-1]["sampling"] = time.perf_counter() - start
        return result

    def sample(self, *args: Any, **options: Any) -> Any:
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        result = self.unmeasured[2](*args, **options)
        events[1].record()
        if self.steps:
            self.steps[-1]["sampled"].append(events)
        return result

    def timed(self, kind: Any) -> type:
        """Return a rejection sampler class that records the time of `_verify` on the host and on the device."""
        import torch

        def _verify(sampler: Any, *args: Any, **options: Any) -> Any:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            start = time.perf_counter()
            events[0].record()
            result = kind._verify(sampler, *args, **options)
            events[1].record()
            self.steps[-1]["verified"].append((time.perf_counter() - start, events, result[2], len(args[0])))
            return result

        return type(kind.__name__, (kind,), {"_verify": _verify, "__module__": kind.__module__})

    def end(self) -> dict[str, Any]:
        import torch

        torch.cuda.synchronize()
        self.runner.execute_model, self.runner.sample_tokens, self.runner.sample = self.unmeasured
        self.runner.batch_sharder = self.configured
        figures, of_stretch = [], 0
        for last, step, following in zip([{"stretch": -1}, *self.steps], self.steps, self.steps[1:]):
            of_stretch = of_stretch + 1 if step["stretch"] == last["stretch"] else 0
            if not (step["counts"] and following["counts"]) or of_stretch < SKIPPED or len(step["verified"]) != 1:
                continue
            [(host, (start, end), emitted, _)], [(head, done)] = step["verified"], step["sampled"]
            figures.append(
                {
                    "mode": step["mode"],
                    "stretch": step["stretch"],
                    "step_us": 1e6 * (following["start"] - step["start"]),
                    "model_host_us": 1e6 * (step["executed"] - step["start"]),
                    "sampling_host_us": 1e6 * step["sampling"],
                    "verify_host_us": 1e6 * host,
                    "verify_device_us": 1e3 * start.elapsed_time(end),
                    "sample_device_us": 1e3 * head.elapsed_time(done),
                    "emitted": int(emitted.sum()),
                    "requests": len(emitted),
                }
            )
        verified = [(rows, len(emitted)) for step in self.steps for _, _, emitted, rows in step["verified"]]
        drafts = sum(rows - requests for rows, requests in verified) / max(1, sum(requests for _, requests in verified))
        result = {"steps": figures, "verified": len(verified), "drafts": round(drafts, 2), "kernels": self.kernels()}
        preempted = sum(step["preempted"] for step in self.steps)
        return result | {"left": dict(Counter(self.left()) - self.left_before), "preempted": preempted}

    def left(self) -> dict[str, int]:
        """Return the number of steps left to vLLM, by reason."""
        return {str(reason): count for reason, count in getattr(self.runner.rejection_sampler, "fallbacks", {}).items()}

    def kernels(self) -> dict[str, Any] | None:
        """Return the profile: the GPU's busy time and the longest kernels, in microseconds a step."""
        import torch

        if self.profiled == 0:
            return None
        self.profiler.stop()
        spans, by_name = [], dict[str, float]()
        for event in self.profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                spans.append((event.time_range.start, event.time_range.end))
                by_name[event.name] = by_name.get(event.name, 0.0) + event.time_range.elapsed_us()
        busy, until = 0.0, -math.inf
        for start, end in sorted(spans):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        count = self.profiled
        most = sorted(by_name.items(), key=lambda item: -item[1])[:16]
        return {"busy_us": busy / count, "steps": count, "most": [(name[:80], us / count) for name, us in most]}


def sharder_of(runner: Any) -> Any:
    """Return the `BatchSharder` that gives each GPU the logits of its own requests."""
    from vllm.v1.worker.gpu.sample.batch_shard import BatchSharder

    return BatchSharder(runner.max_num_reqs, runner.decode_query_len, runner.device, False)


def random_models(folder: Path, vocab: int, hidden: int, layers: int) -> tuple[Path, Path]:
    """Write two random Llama models: the draft is the first two layers of the target, whose later layers add little."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 3 * hidden, "head_dim": 64}
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 8}
    more = {"max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}
    with torch.device("cuda"), torch.no_grad():
        target, draft = (
            LlamaForCausalLM(LlamaConfig(num_hidden_layers=count, **sizes, **heads, **more)).bfloat16()
            for count in (layers, 2)
        )
        target.lm_head.weight.mul_(6 * (1024 / hidden) ** 0.5)
        target.model.embed_tokens.weight.mul_(4)
        for layer in target.model.layers[2:]:
            layer.mlp.down_proj.weight.mul_(0.08)
            layer.self_attn.o_proj.weight.mul_(0.08)
        shared = {name: value for name, value in target.state_dict().items() if name in draft.state_dict()}
        draft.load_state_dict(shared)
    for name, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / name)
    return folder / "target", folder / "draft"


def engine_of(options: argparse.Namespace, drafter: str) -> Any:
    """Return a vLLM engine in a separate process, as in serving, with a worker that measures."""
    from vllm import LLM

    speculative: dict[str, Any] = {"num_speculative_tokens": options.k}
    if drafter == "model":
        speculative |= {"method": "draft_model", "model": str(options.draft), "draft_sample_method": "probabilistic"}
    else:
        speculative |= {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    given = json.loads(options.engine)
    if "reasoning_config" in given:
        from vllm.config.reasoning import ReasoningConfig

        given["reasoning_config"] = ReasoningConfig(**given["reasoning_config"])
    others = {
        "max_model_len": options.steps * (options.k + 1) + PIECES[1] + 256,
        "max_num_seqs": max(options.requests),
        "skip_tokenizer_init": True,
        "seed": 0,
        "worker_extension_cls": "tests.benchmarks.serving.Measuring",
    }
    return LLM(
        model=str(options.target),
        speculative_config=speculative | given.pop("speculative_config", {}),
        dtype="bfloat16",
        kv_cache_memory_bytes=options.kv_cache << 30,
        **others | given,
    )


def serve(engine: Any, prompts: list[list[int]], sampling: dict[str, Any], steps: int) -> None:
    """Serve requests for a number of steps, then abort them."""
    from vllm import SamplingParams

    most = engine.model_config.max_model_len
    seeds = [None if sampling["temperature"] == 0 else 1000 + i for i in range(len(prompts))]
    params = [
        SamplingParams(max_tokens=most - len(prompt), ignore_eos=True, detokenize=False, seed=seed, **sampling)
        for prompt, seed in zip(prompts, seeds)
    ]
    ids = engine.enqueue([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    for _ in range(steps):
        engine.llm_engine.step()
    engine.llm_engine.abort_request(ids, internal=True)


def measured(
    engine: Any, batches: list[list[list[int]]], sampling: dict[str, Any], steps: int, *how: Any
) -> dict[str, Any]:
    """Return the results of a number of steps, divided equally among the batches."""
    engine.collective_rpc("begin_measuring", args=how)
    for prompts in batches:
        serve(engine, prompts, sampling, steps // len(batches))
    results: list[dict[str, Any]] = engine.collective_rpc("end_measuring")
    return max(results, key=lambda result: len(result["steps"]))  # batch-sharded, a GPU may have no request


def tokens_of(files: list[Path], model: Path) -> list[int]:
    """Return the concatenated tokens of texts, by a model's tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [token for file in files for token in tokenizer.encode(file.read_text(), add_special_tokens=False)]


def batches_of(requests: int, text: list[int]) -> list[list[list[int]]]:
    """Return batches of prompts, one for each request: one batch of random tokens, or at least `TEXTS` pieces of a text.

    >>> [[len(prompt) for prompt in prompts] for prompts in batches_of(2, [])]
    [[32, 32]]
    >>> batches = batches_of(3, list(range(10_000)))
    >>> [[prompt[0] for prompt in prompts] for prompts in batches]
    [[0, 1066, 2133], [3200, 4266, 5333], [6400, 7466, 8533]]
    >>> all(200 <= len(prompt) <= 400 for prompts in batches for prompt in prompts)
    True
    """
    draw = random.Random(requests)
    if not text:
        return [[[draw.randrange(2, 1000) for _ in range(PROMPT)] for _ in range(requests)]]
    count = requests * math.ceil(TEXTS / requests)
    starts = [(len(text) - PIECES[1]) * i // count for i in range(count)]
    pieces = [text[start : start + draw.randint(*PIECES)] for start in starts]
    return [pieces[first : first + requests] for first in range(0, count, requests)]


def measured_cells(options: argparse.Namespace, drafter: str) -> list[dict[str, Any]]:
    """Measure all cells of one drafter, in one engine."""
    engine = engine_of(options, drafter)
    text = tokens_of(options.text, options.target) if options.text else []
    cells = []
    for requests, name, exchange in itertools.product(options.requests, options.sampling, options.exchange):
        batches, tokens = batches_of(requests, text), requests * (options.k + 1)
        given = engine, batches[:1], SAMPLING[name]
        # The first calls of both compile what has not been compiled.
        measured(*given, 24, exchange, tokens, ("ours", "vllm"), 4, False)
        result = measured(engine, batches, SAMPLING[name], options.steps, exchange, tokens, ORDER, STRETCH, False)
        cell = {"drafter": drafter, "requests": requests, "sampling": name, "exchange": exchange}
        cell |= compared(result["steps"], requests=requests) | {"left": result["left"]}
        if options.profile:
            how = exchange, tokens
            of_each = {mode: measured(*given, 24, *how, (mode,), 1 << 30, True) for mode in ("vllm", "ours")}
            cell["kernels"] = {mode: result["kernels"] for mode, result in of_each.items()}
            print({mode: round(kernels["busy_us"]) for mode, kernels in cell["kernels"].items()}, "us of a step busy")
        print(line(cell), flush=True)
        cells.append(cell)
        if options.raw is not None:
            with options.raw.open("a") as file:
                file.write(json.dumps(cell | {"steps": result["steps"]}) + "\n")
    engine.llm_engine.engine_core.shutdown()  # otherwise its process is waited for
    return cells


def compared(steps: list[dict[str, Any]], peer: str = "vllm", requests: int | None = None) -> dict[str, Any]:
    """Return the medians of each verification's steps, and the ratio of tokens per second to a peer's, with its interval.

    Args:
        steps: the results of steps.
        peer: the other verification's name.
        requests: requests of a step; None: as in the results, which count only one GPU's requests if batch-sharded.

    >>> def step(stretch, mode, us):
    ...     return {"stretch": stretch, "mode": mode, "step_us": us, "emitted": 6, "requests": 2}
    >>> result = compared([step(0, "ours", 100.0), step(1, "vllm", 110.0), step(2, "vllm", 121.0), step(3, "ours", 110.0)])
    >>> [round(result[key], 3) for key in ("ratio", "ratio_low", "ratio_high")]
    [1.1, 1.1, 1.1]
    >>> result["ours"]["tokens_a_second"]
    57142
    """
    means: dict[int, tuple[str, float]] = {}
    for stretch in sorted({step["stretch"] for step in steps}):
        of_stretch = [step for step in steps if step["stretch"] == stretch]
        means[stretch] = of_stretch[0]["mode"], statistics.fmean(step["step_us"] for step in of_stretch)
    logs = []
    for first in range(0, max(means, default=0), 2):
        if first in means and first + 1 in means:
            by_mode = dict([means[first], means[first + 1]])
            logs.append(math.log(by_mode[peer] / by_mode["ours"]))
    result: dict[str, Any] = {"pairs": len(logs)}
    length = sum(step["emitted"] for step in steps) / sum(step["requests"] for step in steps)
    requests = requests or max(step["requests"] for step in steps)
    for mode in (peer, "ours"):
        own = [step for step in steps if step["mode"] == mode]
        numbers = {key: statistics.median(step[key] for step in own) for key in own[0] if key.endswith("_us")}
        numbers["step_us"] = statistics.fmean(mean for of_mode, mean in means.values() if of_mode == mode)
        if "verify_host_us" in numbers:
            numbers["verify_host_p90_us"] = statistics.quantiles([step["verify_host_us"] for step in own], n=10)[-1]
        numbers = {key: round(value, 1) for key, value in numbers.items()}
        numbers["length"] = round(sum(step["emitted"] for step in own) / sum(step["requests"] for step in own), 3)
        numbers["tokens_a_second"] = int(requests * length / numbers["step_us"] * 1e6)
        result[mode] = numbers
    centre, half = statistics.fmean(logs), 0.0
    if len(set(logs)) > 1:
        from scipy import stats

        half = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / len(logs) ** 0.5
    ratios = {"ratio": centre, "ratio_low": centre - half, "ratio_high": centre + half}
    return result | {key: round(math.exp(value), 4) for key, value in ratios.items()}


def line(cell: dict[str, Any]) -> str:
    """Return a cell as a row of a Markdown table."""
    ours, theirs = cell["ours"], cell["vllm"]

    def both(key: str) -> str:
        return f"{theirs[key]:,.0f} / {ours[key]:,.0f}"

    parts = [
        cell["drafter"],
        f"{cell['requests']}",
        cell["sampling"] + ("" if cell["exchange"] == "default" else f", {cell['exchange']}"),
        f"{theirs['step_us'] / 1e3:.2f} / {ours['step_us'] / 1e3:.2f}",
        both("sample_device_us"),
        both("verify_device_us"),
        f"{both('verify_host_us')} ({both('verify_host_p90_us')})",
        f"{theirs['length']:.2f} / {ours['length']:.2f}",
        both("tokens_a_second"),
        f"{cell['ratio']:.3f} ({cell['ratio_low']:.3f} to {cell['ratio_high']:.3f})",
    ]
    return "| " + " | ".join(parts) + " |"


HEADING = """vLLM / ours, step in ms, `sample` and `_verify` in us (host: median, 90th percentile)
| drafts | requests | sampling | step | sample | _verify | its host time | tokens a step | tokens a second | ratio (95 %) |
|---|---|---|---|---|---|---|---|---|---|"""


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the results: versions, GPU, models."""
    import torch
    import triton
    import vllm

    import specdecode

    sizes = {}
    for folder in filter(None, (options.target, options.draft)):
        config = json.loads((folder / "config.json").read_text())
        sizes[folder] = {key: config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "versions": {each.__name__: each.__version__ for each in (torch, triton, vllm, specdecode)},
        "commit": options.commit or os.popen("git rev-parse --short=12 HEAD").read().strip(),
        "model": sizes[options.target],
        "draft": sizes.get(options.draft),
        "text": [str(file) for file in options.text],
        "num_draft_tokens": options.k,
        "method": os.environ["SPECDECODE_VLLM"],
        "engine": json.loads(options.engine),
    }


def driver() -> str:
    """Return the version of the GPU's driver."""
    return os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().split("\n")[0]


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call made in a new process; its GPU memory is free afterwards."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument(
        "--random", type=int, nargs=3, default=(151_936, 2048, 12), metavar=("VOCAB", "HIDDEN", "LAYERS")
    )
    parser.add_argument("--text", type=Path, nargs="+", default=(), metavar="FILE", help="texts to take prompts from")
    parser.add_argument("--k", type=int, default=3, help="drafts of a request")
    parser.add_argument("--requests", type=int, nargs="+", default=(1, 32, 256))
    parser.add_argument("--sampling", nargs="+", default=list(SAMPLING), choices=list(SAMPLING))
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS, choices=DRAFTERS)
    parser.add_argument("--exchange", nargs="+", default=EXCHANGES[:1], choices=EXCHANGES, help="of logits")
    parser.add_argument("--steps", type=int, default=240, help="of each cell")
    parser.add_argument("--kv-cache", type=int, default=24, help="GiB")
    parser.add_argument("--engine", default="{}", help="further arguments of vLLM's engine, as JSON")
    parser.add_argument("--profile", action="store_true", help="also say which kernels take how long")
    parser.add_argument("--record", type=Path, help="write the table's figures, and what they depend on, to this file")
    parser.add_argument("--commit", help="what the record says was measured, where there is no repository")
    parser.add_argument("--raw", type=Path, help="append each cell, with the figures of its steps, to this file")
    options = parser.parse_args()
    os.environ.setdefault("SPECDECODE_VLLM", "probabilistic")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    with contextlib.ExitStack() as stack:
        if options.target is None:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            options.target, options.draft = in_process(random_models, folder, *options.random)
        print(HEADING, flush=True)
        cells = [cell for drafter in options.drafters for cell in in_process(measured_cells, options, drafter)]
        if options.record is not None:
            options.record.write_text(json.dumps(in_process(about, options) | {"cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
