"""Time `generate(num_draft_tokens="auto")` against every fixed length: run by hand.

    python tests/benchmarks/lengths.py                          the models of the demo
    python tests/benchmarks/lengths.py --target FOLDER --gguf FILE --drop 12 18      a Llama model in a GGUF file

With `--drop` the draft model is the target without these layers. All variants emit the same text (`strict`), so they differ
in time alone. They run in random order, interleaved; the table has medians over the rounds. Measuring the models' calls is
part of no time: they are kept for the models, and the line before the table says how long that took.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdecode.demo import DRAFT, TARGET
from specdecode.integrations.transformers import generate, lengths, measure_cost

DEFAULT = 4
TEXTS = {
    "code": ("def read_file(path):\n", "class Lock:\n    def __init__(self"),
    "prose": ('"""This module provides a way to', "# The following function is called when the"),
    "lists": ("NAMES = {\n    'a': 1,\n    'b': 2,\n    'c': 3,\n", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"),
}


def load(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Return the target, the draft model and the tokenizer."""
    files = {"gguf_file": options.gguf} if options.gguf else {}
    tokenizer = AutoTokenizer.from_pretrained(options.target, **files)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=getattr(torch, options.dtype), **files)
    target = target.to(options.device).eval()
    if options.drop is None:
        return target, AutoModelForCausalLM.from_pretrained(options.draft).to(options.device).eval(), tokenizer
    first, last = options.drop
    config = copy.deepcopy(target.config)
    kept = [layer for layer in range(config.num_hidden_layers) if not first <= layer < last]
    config.num_hidden_layers = 0  # the layers are the target's own
    draft = type(target)(config).eval()
    config.num_hidden_layers = len(kept)
    draft.model.layers = torch.nn.ModuleList()
    for index, layer in enumerate(kept):  # a layer's number is its place in the cache
        shared = copy.copy(target.model.layers[layer])
        shared._modules = dict(shared._modules, self_attn=copy.copy(shared.self_attn))
        shared.self_attn.layer_idx = index
        draft.model.layers.append(shared)
    draft.model.embed_tokens, draft.model.norm = target.model.embed_tokens, target.model.norm
    draft.lm_head = target.lm_head
    return target, draft.to(options.device), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--gguf", help="the GGUF file in the target's folder")
    parser.add_argument("--drop", type=int, nargs=2, help="layers that the draft model leaves out: first, end")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens per text")
    parser.add_argument("--requests", type=int, default=1, help="continuations of each prompt, in one batch")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of each kind")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16], help="4 must be one of them"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a machine that others use")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    lengths.CLOCK = clock
    target, draft, tokenizer = load(options)

    start = clock()
    cost = measure_cost(target, draft, num_requests=options.requests, method="strict")
    measured = clock() - start
    target_call, draft_call = cost[1].item(), (cost[2] - cost[1]).item()
    print(
        f"measuring took {measured:.2f} s; target call {1e3 * target_call:.1f} ms, draft at most {1e3 * draft_call:.1f} ms"
    )
    variants = [*options.lengths, "auto"]
    arguments = {"method": "strict", "max_new_tokens": options.tokens, "temperature": options.temperature, "seeds": 0}
    arguments |= {"eos_token_id": [], "num_return_sequences": options.requests}

    for kind, prompts in TEXTS.items():
        times: dict[object, list[float]] = {variant: [] for variant in variants}
        emitted: dict[object, float] = {}
        texts: dict[str, torch.Tensor] = {}
        for round_number in range(options.rounds):
            for variant in random.Random(round_number).sample(variants, len(variants)):
                total, calls, tokens = 0.0, 0, 0
                for prompt in prompts[: options.prompts]:
                    input_ids = tokenizer(prompt, return_tensors="pt").input_ids.to(options.device)
                    start = clock()
                    output = generate(target, draft, input_ids, num_draft_tokens=variant, **arguments)
                    total += clock() - start
                    calls, tokens = calls + output.target_calls, tokens + int(output.num_generated.sum())
                    same = torch.equal(texts.setdefault(prompt, output.sequences), output.sequences)
                    if not same:  # rounding of the models, for other numbers of columns
                        print(f"{kind}, {variant}: another text")
                times[variant].append(total)
                emitted[variant] = tokens / calls
        medians = {variant: statistics.median(values) for variant, values in times.items()}
        best = min(options.lengths, key=medians.__getitem__)
        print(f"{kind}: auto / best fixed length ({best}) {medians['auto'] / medians[best]:.3f}, ", end="")
        print(f"auto / default ({DEFAULT}) {medians['auto'] / medians[DEFAULT]:.3f}")
        for variant in variants:
            spread = f"{min(times[variant]):.2f} to {max(times[variant]):.2f}"
            print(
                f"  {variant!s:>4}  {medians[variant]:7.3f} s ({spread}), {emitted[variant]:.2f} tokens per target call",
                flush=True,
            )


if __name__ == "__main__":
    main()
