"""Compare the texts of vLLM's engine under its own verification and under this package's, in one engine.

`SPECDECODE_VLLM=probabilistic python -m tests.tools.check_vllm --target DIR --draft DIR --name k7 --k 7` prints a line for
each of the comparisons that `--compare` names, without it of the first four:

- `greedy`: of so many requests, how many texts are equal; beside it how many are when vLLM's own is run twice. A model
  whose numbers depend on the batch need not repeat itself; with `VLLM_BATCH_INVARIANT=1` all have to be equal.
- `adjusted`: the same of greedy requests with penalties, biases, lists of allowed tokens, minimum lengths and bad words, by
  kind; *changed* says how many texts differ from those of plain greedy requests. In one batch of penalties and biases, one
  of the others, and one in which few requests are like these.
- `mixed`: the same of the greedy requests, plain and adjusted, in a batch with sampled, truncated and seeded ones, requests
  with log-probabilities and with all of the above, and prompts of many lengths. Some requests end early.
- `tokens`: p-values of chi-square tests that the second and third token of many requests with one prompt have the same
  distribution under both. They are the first that are verified. Rare tokens share cells.
- `lists`: of rows with the same tokens before them, whether kept sets are equal and how far log-probabilities differ, beside
  the same of vLLM's own, twice. The engine's options have to be `"logprobs_mode": "processed_logprobs"` and
  `"return_sampling_mask": true`.
- `grammar`: greedy requests with a regular expression, a choice or a JSON schema; how many texts that ended are valid; and
  p-values that the second token of sampled ones, which is verified, has the distribution of a first one, which is not. It
  needs a tokenizer in the model's folder, which `--write-tokenizer` writes, and then does nothing else.
- `thinking`: greedy requests that think, with a budget of tokens for it or without one; of sampled ones, how many end their
  thoughts where the budget does. It needs the same tokenizer.

Each line has the steps that were verified, those of them that were left to vLLM (with several GPUs of each rank), the mean
number of drafts of a request in a step, and how often a request was preempted (`"num_gpu_blocks_override"` makes too little
room for all). Where plain greedy texts part, *gaps* says after how many
tokens, and how far apart the logits of the two tokens are. With `--price` vLLM's adaptive verification is told that rows
are expensive, so that it leaves drafts out.

With `SPECDECODE_VLLM=strict` and no `--compare` it prints a hash of seeded texts instead, of a whole batch and of its first
eight requests alone: it has to be the same for every drafter, number of drafts and mode of the engine, as far as the model's
logits are.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.serving import DRAFTERS, SAMPLING, Measuring, engine_of
from tests.tools.requests_to_engines import (
    GRAMMARS,
    REQUESTS,
    TOKENS,
    Texts,
    common_tokens,
    is_valid,
    limits,
    mixed_params,
    p_value,
    params_of,
    penalties_and_biases,
    prompts_of,
    write_tokenizer,
)

MANY = 4096
Results = Iterator[tuple[str, dict[str, Any]]]


class Pricing(Measuring):
    """Mixed into vLLM's worker."""

    def price_rows(self) -> None:
        """Let adaptive verification believe that a row costs a third of drafting: it leaves unlikely drafts out."""
        import numpy as np

        manager = self.model_runner.adaptive_verification  # type: ignore[attr-defined]
        drafting, verifying = (np.arange(len(table), dtype=np.float64) for table in manager.cost_tables)
        manager.cost_tables = 3 * drafting, verifying + 1e-6


def served(engine: Any, mode: str, prompts: Texts, params: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return what the engine returns of requests under one verification, and what was counted."""
    engine.collective_rpc("begin_measuring", args=("default", -1, (mode,), 1, False))
    results = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    ranks = engine.collective_rpc("end_measuring")
    counted = {key: ranks[0][key] for key in ("verified", "drafts", "left", "preempted")}
    if len(ranks) > 1:
        counted["each rank"] = [[rank["verified"], rank["left"]] for rank in ranks]
    return [result.outputs[0] for result in results], counted


def generated(engine: Any, mode: str, prompts: Texts, params: Any) -> tuple[Texts, dict[str, Any]]:
    """Return the texts of requests under one verification, and what was counted."""
    outputs, counted = served(engine, mode, prompts, params)
    return [list(output.token_ids) for output in outputs], counted


def equal(texts: Texts, others: Texts) -> str:
    return f"{sum(a == b for a, b in zip(texts, others))}/{len(texts)}"


def compared(engine: Any, prompts: Texts, params: list[Any], kinds: list[str], plain: Texts | None = None) -> Any:
    """Return how many texts are equal under both, by kind ('' does not count), and of vLLM's run twice; what was counted."""
    theirs, of_vllm = generated(engine, "vllm", prompts, params)
    again, _ = generated(engine, "vllm", prompts, params)
    ours, counted = generated(engine, "ours", prompts, params)
    result: dict[str, Any] = {}
    for kind in dict.fromkeys(filter(None, kinds)):
        of_kind = [i for i, each in enumerate(kinds) if each == kind]
        parts = [[texts[i] for i in of_kind] for texts in (theirs, ours, again, plain or theirs)]
        result[kind] = {"ours": equal(*parts[:2]), "again": equal(parts[0], parts[2])}
        if kind == "plain" and parts[0] != parts[1]:
            result[kind]["gaps"] = gaps(engine, [prompts[i] for i in of_kind], *parts[:2])
        if plain is not None:
            result[kind]["changed"] = sum(text != other[: len(text)] for text, other in zip(parts[0], parts[3]))
    return result | counted | {"vLLM verified": of_vllm["verified"], "shortest": min(map(len, ours))}


def gaps(engine: Any, prompts: Texts, texts: Texts, others: Texts) -> list[Any]:
    """Return, of plain greedy texts that part, where, and how much more likely one token is than the other, in logits.

    Not more than rounding, if both verifications are right: a logit of 16 to 32 is rounded to eighths in bfloat16.
    """
    found = []
    for prompt, text, other in zip(prompts, texts, others):
        if text != other:
            at = next(i for i, tokens in enumerate(zip(text, other)) if len({*tokens}) > 1)
            [output], _ = served(
                engine, "vllm", [[*prompt, *text[:at]]], params_of(temperature=0, max_tokens=1, logprobs=20)
            )
            first, second = (output.logprobs[0].get(each[at]) for each in (text, other))
            found.append([at, round(first.logprob - second.logprob, 4) if first and second else "not among 20"])
    return found


def greedy(engine: Any) -> Results:
    params = [params_of(temperature=0.0)] * REQUESTS
    yield "greedy", compared(engine, prompts_of(REQUESTS), params, ["plain"] * REQUESTS)


def adjusted(engine: Any) -> Results:
    """Compare greedy texts with penalties, biases and limits."""
    prompts = prompts_of(REQUESTS)
    plain, _ = generated(engine, "vllm", prompts, params_of(temperature=0.0))
    common = common_tokens(plain)
    for batch in ("penalties and biases", "limits", "few limits"):
        kinds, params = [], []
        for i, text in enumerate(plain):
            is_limited = batch == "limits" or (batch == "few limits" and i % 9 == 0)
            of_text = list((limits if is_limited else penalties_and_biases)(text, common).items())
            kind, options = of_text[(i // 9 if batch == "few limits" else i) % len(of_text)]
            if batch == "few limits" and not is_limited and i % 2 == 1:
                kind, options = "plain", {}
            kinds.append(kind)
            params.append(params_of(temperature=0.0, max_tokens=10 if is_limited else TOKENS, **options))
        yield batch, compared(engine, prompts, params, kinds, plain)


def mixed(engine: Any) -> Results:
    plain, _ = generated(engine, "vllm", prompts_of(REQUESTS), params_of(temperature=0.0))
    params, kinds = mixed_params(plain)
    yield "mixed", compared(engine, prompts_of(REQUESTS, (3, 40, 170, 11)), params, kinds)


def tokens(engine: Any) -> Results:
    """Compare sampled tokens."""
    plain, _ = generated(engine, "vllm", prompts_of(REQUESTS), params_of(temperature=0.0))
    common = common_tokens(plain)
    samplings: dict[str, dict[str, Any]] = {}
    for name, kind in penalties_and_biases(plain[0], common).items():
        samplings[f"T .8, {name}"] = {"temperature": 0.8, **kind}
    for name in ("allowed", "bad words", "bad pair"):
        samplings[f"T .8, {name}"] = {"temperature": 0.8, **limits(plain[0], common)[name]}
    samplings |= dict(list(SAMPLING.items())[1:])
    for name, sampling in samplings.items():
        prompts, params = prompts_of(1) * MANY, params_of(**sampling, max_tokens=3)
        (theirs, _), (ours, counted) = (generated(engine, mode, prompts, params) for mode in ("vllm", "ours"))
        at = [([text[i] for text in theirs], [text[i] for text in ours]) for i in (1, 2)]
        yield name, {"p": [round(p_value(*samples), 5) for samples in at], **counted}


def lists(engine: Any) -> Results:
    """Compare what is listed of rows that were verified: processed log-probabilities, and kept sets."""
    prompts = prompts_of(1) * MANY
    kinds: dict[str, dict[str, Any]] = {
        "top-k 20, top-p .95": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
        "top-k 200": {"temperature": 1.2, "top_k": 200},
    }
    for name, sampling in kinds.items():
        params = params_of(**sampling, max_tokens=3, logprobs=5)
        runs = [served(engine, mode, prompts, params) for mode in ("vllm", "ours", "vllm")]
        theirs, ours, again = (by_prefix(outputs) for outputs, _ in runs)
        result = {"ours": listed_alike(theirs, ours), "again": listed_alike(theirs, again)}
        yield name, {"lists": result, "left": runs[1][1]["left"], "verified": runs[1][1]["verified"]}


def by_prefix(outputs: list[Any]) -> dict[tuple[int, ...], tuple[dict[int, float], set[int]]]:
    """Return log-probabilities and kept set of each row that was verified, by the tokens before it: one row for each."""
    found = {}
    for output in outputs:
        for i in (1, 2):
            logprobs = {token: each.logprob for token, each in output.logprobs[i].items()}
            found[tuple(output.token_ids[:i])] = logprobs, set(output.sampling_mask.token_ids[i])
    return found


def listed_alike(first: Any, second: Any) -> dict[str, Any]:
    """Return of how many rows kept sets are equal, and how much log-probabilities of the same tokens differ."""
    prefixes = first.keys() & second.keys()
    equal_sets = sum(first[each][1] == second[each][1] for each in prefixes)
    differences = [
        abs(logprob - second[each][0][token]) if logprob != second[each][0][token] else 0.0  # both may be -inf
        for each in prefixes
        for token, logprob in first[each][0].items()
        if token in second[each][0]
    ]
    largest, mean = max(differences), sum(differences) / len(differences)
    return {"rows": len(prefixes), "equal sets": equal_sets, "largest": round(largest, 4), "mean": round(mean, 5)}


def grammar(engine: Any) -> Results:
    """Compare texts with a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

    def structured(temperature: float, most: int, **grammar: Any) -> Any:
        structure = StructuredOutputsParams(**grammar)
        return params_of(temperature=temperature, max_tokens=most, ignore_eos=False, structured_outputs=structure)

    prompts, tokenizer = prompts_of(REQUESTS), engine.get_tokenizer()
    kinds = [*[next(iter(each)) for each in GRAMMARS], "plain"] * (REQUESTS // 4)
    params = [
        params_of(temperature=0.0) if i % 4 == 3 else structured(0.0, 160, **GRAMMARS[i % 4]) for i in range(REQUESTS)
    ]
    yield "grammar", compared(engine, prompts, params, kinds)
    for mode in ("vllm", "ours"):
        for temperature in (0.0, 0.8):
            params = [structured(temperature, 160, **GRAMMARS[i % 3]) for i in range(REQUESTS)]
            texts, counted = generated(engine, mode, prompts, params)
            ended = [
                (i % 3, tokenizer.decode(text[:-1]))
                for i, text in enumerate(texts)
                if text[-1] == tokenizer.eos_token_id
            ]
            valid = sum(is_valid(text, GRAMMARS[which]) for which, text in ended)
            yield f"{mode}, T {temperature}", {"valid": f"{valid}/{len(ended)} that ended of {len(texts)}"} | counted
    [first] = tokenizer.encode("b", add_special_tokens=False)
    [prompt] = prompts_of(1)
    one = structured(0.8, 1, regex="[a-z0-9]{6}")
    unverified, _ = generated(engine, "vllm", [[*prompt, first]] * MANY, one)
    for mode in ("vllm", "ours"):
        texts, _ = generated(engine, mode, [prompt] * MANY, structured(0.8, 3, regex="b[a-z0-9]{6}"))
        samples = [text[0] for text in unverified], [text[1] for text in texts]
        yield f"{mode}, second token", {"p": [round(p_value(*samples), 5)]}


def thinking(engine: Any) -> Results:
    """Compare texts whose thoughts a budget ends."""
    marks = engine.llm_engine.vllm_config.reasoning_config
    end = marks.reasoning_end_token_ids
    prompts = [[*prompt, *marks.reasoning_start_token_ids] for prompt in prompts_of(REQUESTS)]
    budgets = [i % 8 for i in range(REQUESTS)]
    kinds = [f"budget {budget}" if budget else "plain" for budget in budgets]
    options = [{"thinking_token_budget": budget} if budget else {} for budget in budgets]
    params = [params_of(temperature=0.0, **each) for each in options]
    plain, _ = generated(engine, "vllm", prompts, params_of(temperature=0.0))
    yield "thinking", compared(engine, prompts, params, kinds, plain)
    params = [params_of(temperature=0.8, **each) for each in options]
    for mode in ("vllm", "ours"):
        texts, counted = generated(engine, mode, prompts, params)
        ended = [text[n : n + len(end)] == end for text, n in zip(texts, budgets) if n]
        yield f"{mode}, T 0.8", {"thoughts that ended": f"{sum(ended)}/{len(ended)}"} | counted


def seeded(engine: Any) -> dict[str, Any]:
    """Return hashes of seeded texts."""
    prompts = prompts_of(REQUESTS, (3, 40, 170, 11))
    kinds = list(SAMPLING.values())[1:]
    params = [params_of(**kinds[i % 3], seed=100 + i) for i in range(REQUESTS)]
    texts, counted = generated(engine, "ours", prompts, params)
    alone, _ = generated(engine, "ours", prompts[:8], params[:8])
    result = {f"first {count}": digest(texts[:count]) for count in (8, REQUESTS)}
    each = " ".join(digest([text]) for text in texts)
    return result | {"alone": equal(alone, texts[:8]), "each": each} | counted


def digest(texts: Texts) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:6]


COMPARISONS = {each.__name__: each for each in (greedy, adjusted, mixed, tokens, lists, grammar, thinking)}
DEFAULT = "greedy", "adjusted", "mixed", "tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--drafter", choices=DRAFTERS, default="model")
    parser.add_argument("--name", default="")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--kv-cache", type=int, default=3)
    parser.add_argument("--engine", default="{}")
    parser.add_argument("--compare", nargs="+", choices=list(COMPARISONS))
    parser.add_argument("--price", action="store_true")
    parser.add_argument("--write-tokenizer", action="store_true")
    options = parser.parse_args()
    if options.write_tokenizer:
        return write_tokenizer(options.target)
    options.requests, options.steps = [256], 64
    own: dict[str, Any] = {
        "worker_extension_cls": "tests.tools.check_vllm.Pricing",
        "skip_tokenizer_init": not {"grammar", "thinking"} & {*(options.compare or ())},
    }
    if "thinking" in (options.compare or ()):
        own["reasoning_config"] = {"reasoning_start_str": "ab", "reasoning_end_str": "cd"}
    options.engine = json.dumps(own | json.loads(options.engine))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    engine = engine_of(options, options.drafter)
    print("READY", flush=True)
    if options.price:
        engine.collective_rpc("price_rows")
    if os.environ["SPECDECODE_VLLM"] == "strict" and options.compare is None:
        print("RESULT", options.name, json.dumps(seeded(engine)), flush=True)
        return
    for name in options.compare or DEFAULT:
        for part, result in COMPARISONS[name](engine):
            print("RESULT", options.name, part, json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
