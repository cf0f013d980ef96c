"""Compare the texts of vLLM's engine under its own verification and under this package's, in one engine.

`SPECDECODE_VLLM=probabilistic python -m tests.tools.check_vllm --target DIR --draft DIR --name k7 --k 7` prints one line:

- *greedy*: of so many requests, how many texts are equal; beside it how many are when vLLM's own is run twice. A model
  whose numbers depend on the batch need not repeat itself.
- *mixed*: the same of the greedy requests in a batch with sampled, truncated and seeded ones, prompts of many lengths,
  requests with log-probabilities, `min_p`, `logit_bias` and penalties, some of which end early.
- *tokens*: p-values of chi-square tests that the second and third token of many requests with one prompt have the same
  distribution under both. They are the first that are verified. Rare tokens are put together.

With `SPECDECODE_VLLM=strict` it prints a hash of seeded texts instead, of a whole batch and of its first eight requests
alone: it has to be the same for every drafter, number of drafts and mode of the engine, as far as the model's logits are.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.serving import DRAFTERS, SAMPLING, engine_of

REQUESTS, TOKENS, MANY = 64, 40, 4096


def generated(engine: Any, mode: str, prompts: list[list[int]], params: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the texts of requests under one verification, and what was counted."""
    engine.collective_rpc("begin_measuring", args=(-1, (mode,), 1, False))
    results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    counted = engine.collective_rpc("end_measuring")[0]
    return [list(result.outputs[0].token_ids) for result in results], counted


def equal(texts: list[list[int]], others: list[list[int]]) -> str:
    return f"{sum(a == b for a, b in zip(texts, others))}/{len(texts)}"


def params_of(**options: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False} | options)


def prompts_of(count: int, lengths: tuple[int, ...] = (24,)) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(2, 1000) for _ in range(lengths[i % len(lengths)])] for i in range(count)]


def mixed_params() -> list[Any]:
    """Every fourth request is greedy and plain."""
    others = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
        {"temperature": 0.7, "min_p": 0.05, "max_tokens": 7},
        {"temperature": 0.0, "logit_bias": {5: -3.0, 7: 2.5}, "max_tokens": 21},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 0.8, "top_p": 0.95, "max_tokens": 3},
        {"temperature": 0.9, "repetition_penalty": 1.1, "max_tokens": 12},
    ]
    return [params_of(temperature=0.0) if i % 4 == 0 else params_of(**others[i % len(others)]) for i in range(REQUESTS)]


def p_value(first: list[int], second: list[int]) -> float:
    """Return the p-value of a chi-square test that two samples have one distribution; rare tokens are one category."""
    from scipy import stats

    counts = [collections.Counter(sample) for sample in (first, second)]
    often = [token for token in {*first, *second} if sum(each[token] for each in counts) >= 20]
    table = [
        [each[token] for token in often] + [sum(each.values()) - sum(each[token] for token in often)] for each in counts
    ]
    columns = [column for column in zip(*table) if sum(column)]
    return float(stats.chi2_contingency(list(zip(*columns))).pvalue) if len(columns) > 1 else 1.0


def checked(engine: Any) -> dict[str, Any]:
    """Compare both verifications."""
    result: dict[str, Any] = {}
    prompts, greedy = prompts_of(REQUESTS), params_of(temperature=0.0)
    theirs, counted = generated(engine, "vllm", prompts, greedy)
    again, _ = generated(engine, "vllm", prompts, greedy)
    ours, of_ours = generated(engine, "ours", prompts, greedy)
    result["greedy"] = {"ours": equal(theirs, ours), "again": equal(theirs, again)}
    result["steps"] = {"vllm": counted["verified"], "ours": of_ours["verified"], "left": of_ours["left"]}
    prompts, params = prompts_of(REQUESTS, (3, 40, 170, 11)), mixed_params()
    theirs, _ = generated(engine, "vllm", prompts, params)
    again, _ = generated(engine, "vllm", prompts, params)
    ours, of_ours = generated(engine, "ours", prompts, params)
    result["mixed"] = {"ours": equal(theirs[::4], ours[::4]), "again": equal(theirs[::4], again[::4])}
    result["mixed"] |= {"left": of_ours["left"], "shortest": min(map(len, ours)), "verified": of_ours["verified"]}
    result["tokens"] = {}
    for name, sampling in list(SAMPLING.items())[1:]:
        prompts, params = prompts_of(1) * MANY, params_of(**sampling, max_tokens=3)
        theirs, ours = (generated(engine, mode, prompts, params)[0] for mode in ("vllm", "ours"))
        at = [([text[i] for text in theirs], [text[i] for text in ours]) for i in (1, 2)]
        result["tokens"][name] = [round(p_value(*samples), 5) for samples in at]
    return result


def seeded(engine: Any) -> dict[str, Any]:
    """Return hashes of seeded texts."""
    prompts = prompts_of(REQUESTS, (3, 40, 170, 11))
    kinds = list(SAMPLING.values())[1:]
    params = [params_of(**kinds[i % 3], seed=100 + i) for i in range(REQUESTS)]
    texts, counted = generated(engine, "ours", prompts, params)
    alone, _ = generated(engine, "ours", prompts[:8], params[:8])
    result = {f"first {count}": digest(texts[:count]) for count in (8, REQUESTS)}
    each = " ".join(digest([text]) for text in texts)
    return result | {
        "alone": equal(alone, texts[:8]),
        "each": each,
        "left": counted["left"],
        "verified": counted["verified"],
    }


def digest(texts: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--drafter", choices=DRAFTERS, default="model")
    parser.add_argument("--name", default="")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--kv-cache", type=int, default=3)
    parser.add_argument("--engine", default="{}")
    options = parser.parse_args()
    options.requests, options.steps = [256], 64
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    engine = engine_of(options, options.drafter)
    result = seeded(engine) if os.environ["SPECDECODE_VLLM"] == "strict" else checked(engine)
    print("RESULT", options.name, json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
