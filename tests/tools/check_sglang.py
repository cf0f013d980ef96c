"""SGLang's engine with this package's verification and its own, in turn, in one engine: the same texts? What time?

`python -m tests.tools.check_sglang --draft eagle --drawn --time` in the repository's root, with a GPU, SGLang and this
package installed. It makes random models, unless `--target DIR --draft-model DIR` names others, and prints

- of greedy requests, how many texts are those of SGLang; beside it how many are when SGLang's own is run again. With drafts
  that are drawn batches differ from run to run, and so may logits. Different texts are an error if SGLang repeats its own in
  full, which it should with drafts that are not drawn; else if Fisher's exact test says that there are more of them.
- p-values of chi-square tests that the first four tokens of many requests with one prompt, and tokens 2 and 3, and all four
  together, have the same distribution under both. The prefill draws the first, whoever verifies: a control. A p-value below
  1e-4 is an error: of 12 p-values one is in at most about one of 800 runs, if all is right. With 4,000 samples nine of ten
  errors are seen whose total variation is .12, spread over all cells; smaller ones if they are in fewer tokens.
- with `--time`, tokens a second of both, measured as `tests.benchmarks.serving` does: a few steps with one, as many with the
  other, in one run; the time that `eagle_sample` takes the host and the device.

The exit status is 1 if there is an error, or if this package left a step to SGLang. `--record FILE.json` keeps all figures.
"""

import argparse
import json
import os
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.serving import SAMPLING, compared, driver, in_process, random_models
from tests.tools.requests_to_engines import Texts, p_value, prompts_of
from tests.tools.sglang_engine import (
    DRAFTS,
    IN_TURN,
    OURS,
    RUNNING,
    SGLANG,
    VARIABLE,
    SwitchedEngine,
    acceptance_length,
    counted,
    engine_arguments,
    write_plugin,
)

SIZES = 151_936, 1024, 8
"""Tokens, width and layers of the random target."""
CASES = dict(list(SAMPLING.items())[:3])
GREEDY, TOKENS = 64, 96
ALARM = 1e-4
ROUNDS, LONG = 3, 512
"""Of what is timed: how often the requests are served, and how many tokens each emits."""


# ---- Models ----------------------------------------------------------------------------------------------------------


def models(folder: Path, draft: str) -> tuple[Path, Path]:
    """Write a random target, and a draft that agrees with it in part."""
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


# ---- Greedy texts ----------------------------------------------------------------------------------------------------


def greedy(engine: SwitchedEngine, drawn: bool) -> dict[str, Any]:
    """Compare greedy texts with the first that SGLang's own verification makes."""
    prompts, texts, lengths = prompts_of(GREEDY), dict[str, Texts](), dict[str, float]()
    for run in (SGLANG, OURS, f"{SGLANG} again", f"{OURS} again"):
        results = engine.serve(run.split()[0], prompts, CASES["greedy"], TOKENS, held=True)
        texts[run], lengths[run] = [each["output_ids"] for each in results], acceptance_length(results)
    base = texts.pop(SGLANG)
    runs = {run: differences(others, base) for run, others in texts.items()}
    of_ours, again = (GREEDY - runs[run]["equal"] for run in (f"{OURS} again", f"{SGLANG} again"))
    most = max(of_ours, GREEDY - runs[OURS]["equal"])
    wrong = is_wrong(most, again, GREEDY, repeats=not drawn and again == 0)
    return {"requests": GREEDY, "tokens": TOKENS, "lengths": lengths, "with SGLang's first": runs, "wrong": wrong}


def differences(texts: Texts, others: Texts) -> dict[str, Any]:
    """Return how many texts are equal, and where the first of those that are not differ."""
    pairs = [(text, other) for text, other in zip(texts, others) if text != other]
    first = [next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), min(map(len, pair))) for pair in pairs]
    return {"equal": len(texts) - len(pairs), "first_differences": first[:8]}


def is_wrong(ours: int, again: int, requests: int, repeats: bool) -> bool:
    """Return whether more texts differ from SGLang's than its own repetition shows.

    Args:
        ours: how many of this package's differ.
        again: how many of SGLang's own differ when it is run again.
        requests: how many there are of each.
        repeats: SGLang makes the same texts whenever it is run, so that any difference is wrong.
    """
    from scipy import stats

    if repeats:
        return ours > 0
    table = [[ours, requests - ours], [again, requests - again]]
    return bool(stats.fisher_exact(table, alternative="greater")[1] < ALARM)


# ---- Sampled tokens --------------------------------------------------------------------------------------------------


def sampled(engine: SwitchedEngine, name: str, count: int) -> dict[str, Any]:
    """Compare the first tokens of so many requests with one prompt, and acceptance lengths of longer texts."""
    texts, lengths = dict[str, Texts](), dict[str, float]()
    for mode in (OURS, SGLANG):
        engine.serve(mode, prompts_of(1) * 8, CASES[name], 8)  # what is compiled at its first call is
        results = engine.serve(mode, prompts_of(1) * count, CASES[name], 6)
        texts[mode] = [each["output_ids"] for each in results]
    for mode in (OURS, SGLANG):
        lengths[mode] = acceptance_length(engine.serve(mode, prompts_of(RUNNING), CASES[name], 64))
    tokens = {f"token {i + 1}": slice(i, i + 1) for i in range(4)} | {"tokens 2-3": slice(1, 3), "tokens 1-4": slice(4)}
    p_values = {}
    for key, part in tokens.items():
        samples = [[tuple(text[part]) for text in texts[mode]] for mode in (OURS, SGLANG)]
        p_values[key] = p_value(*samples)
    return {"requests": count, "p": p_values, "lengths": lengths}


# ---- Time ------------------------------------------------------------------------------------------------------------


def timed(engine: SwitchedEngine, requests: int, name: str) -> dict[str, Any]:
    """Measure both in turn: medians of each, and the ratio of tokens a second with its interval."""
    prompts, steps = prompts_of(requests), list[dict[str, Any]]()
    for mode in (OURS, SGLANG):
        engine.serve(mode, prompts, CASES[name], 24, held=True)
    for i in range(ROUNDS):
        engine.serve(IN_TURN, prompts, CASES[name], LONG, held=True)
        own = counted(engine.report()["steps"], requests)
        steps += [step | {"stretch": step["stretch"] + 1000 * i} for step in own]
    return {"requests": requests, "sampling": name} | compared(steps, peer=SGLANG)


HEADING = """SGLang / ours, step in ms, `eagle_sample` in us (host: median, 90th percentile)
| requests | sampling | step | device | host | tokens a second | ratio (95 %) |
|---|---|---|---|---|---|---|"""


def line(cell: dict[str, Any]) -> str:
    """Return a cell as a row of a Markdown table."""
    ours, theirs = cell[OURS], cell[SGLANG]

    def both(key: str) -> str:
        return f"{theirs[key]:,.0f} / {ours[key]:,.0f}"

    parts = [
        f"{cell['requests']}",
        cell["sampling"],
        f"{theirs['step_us'] / 1e3:.2f} / {ours['step_us'] / 1e3:.2f}",
        both("verify_device_us"),
        f"{both('verify_host_us')} ({both('verify_host_p90_us')})",
        both("tokens_a_second"),
        f"{cell['ratio']:.3f} ({cell['ratio_low']:.3f} to {cell['ratio_high']:.3f})",
    ]
    return "| " + " | ".join(parts) + " |"


# ---- All of it -------------------------------------------------------------------------------------------------------


def about(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures depend on."""
    import sgl_kernel
    import sglang
    import torch
    import triton

    import specdecode

    config = json.loads((options.target / "config.json").read_text())
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "versions": {each.__name__: each.__version__ for each in (torch, triton, sglang, sgl_kernel, specdecode)},
        "commit": options.commit or os.popen("git rev-parse --short=12 HEAD").read().strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "model": {key: config[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")},
        "method": options.method,
        "draft": options.draft,
        "drawn": options.drawn,
        "num_draft_tokens": options.num_draft_tokens,
        "engine": engine_arguments(options),
    }


def errors_of(results: dict[str, Any]) -> list[str]:
    """Return what is wrong."""
    errors = ["greedy texts differ"] if results["greedy"]["wrong"] else []
    for name, sample in results["samples"].items():
        errors += [f"{name}: {tokens}, p = {p:.2g}" for tokens, p in sample["p"].items() if p < ALARM]
    errors += [f"{count} steps left to SGLang: {reason}" for reason, count in results["fallbacks"].items()]
    return errors + [f"{mode}: no step verified" for mode in (OURS, SGLANG) if not results["verified"].get(mode)]


def checked(engine: SwitchedEngine, options: argparse.Namespace) -> dict[str, Any]:
    """Return all results, each printed as it comes."""
    engine.report()  # or raise an error now, if the plug-ins do not work
    results: dict[str, Any] = {"greedy": greedy(engine, options.drawn), "samples": {}, "cells": []}
    for run, each in results["greedy"]["with SGLang's first"].items():
        others = f", others until token {each['first_differences']}" if each["first_differences"] else ""
        print(f"greedy, {run} with SGLang's first: {each['equal']} of {GREEDY} texts equal{others}")
    print(f"greedy, acceptance lengths: {results['greedy']['lengths']}", flush=True)
    for name in list(CASES)[1:]:
        sample = results["samples"][name] = sampled(engine, name, options.samples)
        print(f"{name}, p-values: " + ", ".join(f"{tokens} {p:.2g}" for tokens, p in sample["p"].items()))
        print(f"{name}, acceptance lengths: {sample['lengths']}", flush=True)
    p_values = [p for sample in results["samples"].values() for p in sample["p"].values()]
    print(f"{len(p_values)} p-values, smallest {min(p_values):.2g}; one below {ALARM:g} is an error", flush=True)
    if options.time:
        print(HEADING, flush=True)
        for requests in options.requests:
            for name in CASES:
                results["cells"].append(timed(engine, requests, name))
                print(line(results["cells"][-1]), flush=True)
    report = engine.report()
    results |= {"verified": report["verified"], "fallbacks": report["fallbacks"]}
    results["errors"] = errors_of(results)
    print(f"steps verified: {results['verified']}, left to SGLang: {results['fallbacks']}")
    print("\n".join(results["errors"]) or "no errors", flush=True)
    return results


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", choices=DRAFTS, required=True)
    parser.add_argument("--drawn", action="store_true", help="draw drafts: --speculative-use-rejection-sampling")
    parser.add_argument("--method", choices=("probabilistic", "strict", "block"), default="probabilistic")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="drafts of a request")
    parser.add_argument("--requests", type=int, nargs="+", default=(1, 32, 256), help="of what is timed")
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--target", type=Path)
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--record", type=Path, help="write all figures, and what they depend on, to this file")
    parser.add_argument("--commit", help="what the record says was measured, where there is no repository")
    options = parser.parse_args(arguments)
    if options.drawn and options.draft == "standalone":
        parser.error("--drawn: expected --draft eagle, SGLang draws no others")
    if (options.target is None) != (options.draft_model is None):
        parser.error("--target, --draft-model: expected both or neither")
    return options


def main() -> int:
    """Check, print and record."""
    options, status = options_of(), 1
    with TemporaryDirectory() as name:
        folder = Path(name)
        if options.target is None:
            options.target, options.draft_model = in_process(models, folder, options.draft)
        record = in_process(about, options)
        (folder / "plug-in").mkdir()
        write_plugin(folder / "plug-in")
        paths = [str(folder / "plug-in"), os.getcwd()]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
        sys.path.insert(0, paths[0])  # SGLang's processes are given this process's path
        os.environ |= {"SPECDECODE_SGLANG": options.method, VARIABLE: str(folder / "control")}
        engine = SwitchedEngine(options, folder)
        try:
            results = checked(engine, options)
            status = int(bool(results["errors"]))
            if options.record is not None:
                options.record.write_text(json.dumps(record | results, indent=1) + "\n")
        finally:
            engine.close(status)
    return status


if __name__ == "__main__":
    try:
        status = main()
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # threads of SGLang may not end
