"""vLLM's engine with both verifications, for `check_engine`.

More comparisons, each together with a second run of the engine's own verification:

- `adjusted`: greedy requests with penalties, biases, lists of allowed tokens, minimum lengths and bad words, by kind;
  *changed* is the number of texts that differ from plain greedy ones. One batch has penalties and biases, one has the
  others, and in one only few requests have any.
- `mixed`: the greedy requests, plain and adjusted, in a batch with sampled, truncated and seeded ones, requests with
  log-probabilities and with all of the above, and prompts of many lengths. Some requests end early.
- `lists`: for rows after the same tokens, whether kept sets are equal, and the differences of log-probabilities. The
  engine's options must be `"logprobs_mode": "processed_logprobs"` and `"return_sampling_mask": true`.
- `grammar`: greedy requests with a regular expression, a choice or a JSON schema; the number of valid complete texts; and
  a p-value for equal distributions of the second token of sampled requests, which is verified, and a first token, which
  is not. It needs a tokenizer in the model's folder, which `--write-tokenizer` writes before it exits.
- `thinking`: greedy requests that think, with and without a token budget; and the number of sampled requests whose
  thoughts end at the budget. It needs the same tokenizer.
- `seeded`: a hash of seeded texts of `SPECDECODE_VLLM=strict`, of a whole batch and of only its first eight requests. It
  must be the same for every drafter, number of drafts and mode of the engine, if the model's logits are.

Counts are the verified steps, the steps left to vLLM (for each rank with several GPUs), the mean number of drafts of a
request in a step, and the number of preemptions (`"num_gpu_blocks_override"` limits memory to cause them). *Gaps* also
has the difference of the logits of the two tokens. With `--price` vLLM's adaptive verification assumes that rows are
expensive, so that it omits drafts.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tests.benchmarks.serving import DRAFTERS, SAMPLING, Measuring, engine_of
from tests.tools.check_engine import OURS, REQUESTS, Results, Served, Texts, compared, p_value, parts_at, prompts_of
from tests.tools.vllm_requests import (
    GRAMMARS,
    common_tokens,
    is_valid,
    limits,
    mixed_samplings,
    penalties_and_biases,
    write_tokenizer,
)

VLLM = "vllm"
GREEDY = {"temperature": 0.0}


class Pricing(Measuring):
    """Mixed into vLLM's worker."""

    def price_rows(self) -> None:
        """Make adaptive verification assume that a row costs a third of drafting, so that it omits unlikely drafts."""
        import numpy as np

        manager = self.model_runner.adaptive_verification  # type: ignore[attr-defined]
        drafting, verifying = (np.arange(len(table), dtype=np.float64) for table in manager.cost_tables)
        manager.cost_tables = 3 * drafting, verifying + 1e-6


class SwitchedEngine:
    """An engine of vLLM whose worker changes verifications."""

    name, tokens, samples = VLLM, 40, 4096

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.repeats = os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0")

    def outputs(self, mode: str, prompts: Texts, sampling: Any, tokens: int) -> tuple[list[Any], dict[str, Any]]:
        """Return vLLM's outputs of requests under one verification, and counts."""
        samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        params = [params_of(**{"max_tokens": tokens} | each) for each in samplings]
        self.llm.collective_rpc("begin_measuring", args=("default", -1, (mode,), 1, False))
        results = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        ranks = self.llm.collective_rpc("end_measuring")
        counted = {key: ranks[0][key] for key in ("verified", "drafts", "left", "preempted")}
        if len(ranks) > 1:
            counted["each rank"] = [[rank["verified"], rank["left"]] for rank in ranks]
        return [result.outputs[0] for result in results], counted

    def serve(self, mode: str, prompts: Texts, sampling: Any, tokens: int, held: bool = False) -> Served:
        """Serve requests under one verification, see `check_engine.Engine`; all requests come at once."""
        outputs, counted = self.outputs(mode, prompts, sampling, tokens)
        return Served([list(output.token_ids) for output in outputs], counted)

    def plain(self) -> Texts:
        """Return the texts of plain greedy requests."""
        return self.serve(VLLM, prompts_of(REQUESTS), GREEDY, self.tokens).texts

    def samplings(self) -> dict[str, dict[str, Any]]:
        """Return the kinds of requests whose tokens are compared."""
        plain = self.plain()
        common, limited = common_tokens(plain), limits(plain[0], common_tokens(plain))
        kinds = penalties_and_biases(plain[0], common)
        kinds |= {name: limited[name] for name in ("allowed", "bad words", "bad pair")}
        adjusting = {f"T .8, {name}": {"temperature": 0.8, **kind} for name, kind in kinds.items()}
        return adjusting | dict(list(SAMPLING.items())[1:])

    def gaps(self, prompts: Texts, texts: Texts, others: Texts) -> list[Any]:
        """Return for each pair of different texts the first different index, and the difference of the two logits.

        If both verifications are right, the difference is only rounding: a logit of 16 to 32 is rounded to eighths in
        bfloat16.
        """
        found = []
        for prompt, text, other in zip(prompts, texts, others):
            if text != other:
                at = parts_at(text, other)
                [output], _ = self.outputs(VLLM, [[*prompt, *text[:at]]], GREEDY | {"logprobs": 20}, 1)
                first, second = (output.logprobs[0].get(each[at]) for each in (text, other))
                found.append([at, round(first.logprob - second.logprob, 4) if first and second else "not among 20"])
        return found

    def errors(self) -> list[str]:
        """Return no errors: steps left to vLLM are part of the counts."""
        return []

    def close(self, status: int) -> None:
        """Do nothing: vLLM ends its engine with this process."""


def params_of(**options: Any) -> Any:
    """Return vLLM's parameters of a request with a fixed number of tokens."""
    from vllm import SamplingParams

    bad_words = options.pop("bad_words_token_ids", None)
    params = SamplingParams(**{"ignore_eos": True, "detokenize": False} | options)
    params._bad_words_token_ids = bad_words  # without a tokenizer, words cannot be converted
    return params


# ---- Comparisons -----------------------------------------------------------------------------------------------------


def adjusted(engine: SwitchedEngine) -> Results:
    """Compare greedy texts with penalties, biases and limits."""
    plain = engine.plain()
    common = common_tokens(plain)
    for batch in ("penalties and biases", "limits", "few limits"):
        kinds, samplings = list[str](), list[dict[str, Any]]()
        for i, text in enumerate(plain):
            is_limited = batch == "limits" or (batch == "few limits" and i % 9 == 0)
            of_text = list((limits if is_limited else penalties_and_biases)(text, common).items())
            kind, options = of_text[(i // 9 if batch == "few limits" else i) % len(of_text)]
            if batch == "few limits" and not is_limited and i % 2 == 1:
                kind, options = "plain", {}
            kinds.append(kind)
            samplings.append(GREEDY | {"max_tokens": 10 if is_limited else engine.tokens} | options)
        yield batch, compared(engine, prompts_of(REQUESTS), samplings, kinds, plain)


def mixed(engine: SwitchedEngine) -> Results:
    """Compare greedy texts in a batch of all kinds of requests."""
    samplings, kinds = mixed_samplings(engine.plain())
    yield "mixed", compared(engine, prompts_of(REQUESTS, (3, 40, 170, 11)), samplings, kinds)


def lists(engine: SwitchedEngine) -> Results:
    """Compare the lists of rows that were verified: processed log-probabilities, and kept sets."""
    prompts = prompts_of(1) * engine.samples
    kinds: dict[str, dict[str, Any]] = {
        "top-k 20, top-p .95": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
        "top-k 200": {"temperature": 1.2, "top_k": 200},
    }
    for name, sampling in kinds.items():
        runs = [engine.outputs(mode, prompts, sampling | {"logprobs": 5}, 3) for mode in (VLLM, OURS, VLLM)]
        theirs, ours, again = (by_prefix(outputs) for outputs, _ in runs)
        result = {"ours": listed_alike(theirs, ours), "again": listed_alike(theirs, again)}
        yield name, {"lists": result} | runs[1][1]


def by_prefix(outputs: list[Any]) -> dict[tuple[int, ...], tuple[dict[int, float], set[int]]]:
    """Return the log-probabilities and kept set of each verified row, by the tokens before it; one row for each prefix."""
    found = {}
    for output in outputs:
        for i in (1, 2):
            logprobs = {token: each.logprob for token, each in output.logprobs[i].items()}
            found[tuple(output.token_ids[:i])] = logprobs, set(output.sampling_mask.token_ids[i])
    return found


def listed_alike(first: Any, second: Any) -> dict[str, Any]:
    """Return the number of rows with equal kept sets, and the differences of log-probabilities of the same tokens."""
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


def grammar(engine: SwitchedEngine) -> Results:
    """Compare texts with a grammar."""
    from vllm.sampling_params import StructuredOutputsParams

    def structured(temperature: float, **grammar: Any) -> dict[str, Any]:
        structure = StructuredOutputsParams(**grammar)
        return {"temperature": temperature, "ignore_eos": False, "structured_outputs": structure}

    prompts, tokenizer = prompts_of(REQUESTS), engine.llm.get_tokenizer()
    kinds = [*[next(iter(each)) for each in GRAMMARS], "plain"] * (REQUESTS // 4)
    samplings = [
        GREEDY if i % 4 == 3 else structured(0.0, **GRAMMARS[i % 4]) | {"max_tokens": 160} for i in range(REQUESTS)
    ]
    yield "grammar", compared(engine, prompts, samplings, kinds)
    for mode in (VLLM, OURS):
        for temperature in (0.0, 0.8):
            samplings = [structured(temperature, **GRAMMARS[i % 3]) for i in range(REQUESTS)]
            texts, counted = engine.serve(mode, prompts, samplings, 160)
            ended = [
                (i % 3, tokenizer.decode(text[:-1]))
                for i, text in enumerate(texts)
                if text[-1] == tokenizer.eos_token_id
            ]
            valid = sum(is_valid(text, GRAMMARS[which]) for which, text in ended)
            yield f"{mode}, T {temperature}", {"valid": f"{valid}/{len(ended)} that ended of {len(texts)}"} | counted
    [first], [prompt] = tokenizer.encode("b", add_special_tokens=False), prompts_of(1)
    many = [[*prompt, first]] * engine.samples
    unverified = engine.serve(VLLM, many, structured(0.8, regex="[a-z0-9]{6}"), 1).texts
    for mode in (VLLM, OURS):
        texts = engine.serve(mode, [prompt] * engine.samples, structured(0.8, regex="b[a-z0-9]{6}"), 3).texts
        p = p_value([text[0] for text in unverified], [text[1] for text in texts])
        yield f"grammar, {mode}", {"p": {"second token": p}}


def thinking(engine: SwitchedEngine) -> Results:
    """Compare texts whose thoughts a budget ends."""
    marks = engine.llm.llm_engine.vllm_config.reasoning_config
    end = marks.reasoning_end_token_ids
    prompts = [[*prompt, *marks.reasoning_start_token_ids] for prompt in prompts_of(REQUESTS)]
    budgets = [i % 8 for i in range(REQUESTS)]
    kinds = [f"budget {budget}" if budget else "plain" for budget in budgets]
    options = [{"thinking_token_budget": budget} if budget else {} for budget in budgets]
    plain = engine.serve(VLLM, prompts, GREEDY, engine.tokens).texts
    yield "thinking", compared(engine, prompts, [GREEDY | each for each in options], kinds, plain)
    for mode in (VLLM, OURS):
        texts, counted = engine.serve(mode, prompts, [{"temperature": 0.8} | each for each in options], engine.tokens)
        ended = [text[n : n + len(end)] == end for text, n in zip(texts, budgets) if n]
        yield f"{mode}, T 0.8", {"thoughts that ended": f"{sum(ended)}/{len(ended)}"} | counted


def seeded(engine: SwitchedEngine) -> Results:
    """Hash seeded texts."""
    prompts, kinds = prompts_of(REQUESTS, (3, 40, 170, 11)), list(SAMPLING.values())[1:]
    samplings = [kinds[i % 3] | {"seed": 100 + i} for i in range(REQUESTS)]
    texts, counted = engine.serve(OURS, prompts, samplings, engine.tokens)
    alone = engine.serve(OURS, prompts[:8], samplings[:8], engine.tokens).texts
    result: dict[str, Any] = {f"first {count}": digest(texts[:count]) for count in (8, REQUESTS)}
    result["alone"] = f"{sum(text == other for text, other in zip(alone, texts))}/8"
    yield "seeded", result | {"each": " ".join(digest([text]) for text in texts)} | counted


def digest(texts: Texts) -> str:
    """Return a short hash of texts."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:6]


COMPARISONS = {each.__name__: each for each in (adjusted, mixed, lists, grammar, thinking, seeded)}


# ---- A run -----------------------------------------------------------------------------------------------------------


def default_comparisons() -> list[str]:
    """Return the default comparisons."""
    return ["seeded"] if os.environ.get("SPECDECODE_VLLM") == "strict" else ["greedy", "adjusted", "mixed", "tokens"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of an engine of vLLM."""
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--drafter", choices=DRAFTERS, default="model")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--kv-cache", type=int, default=3)
    parser.add_argument("--engine", default="{}")
    parser.add_argument("--price", action="store_true")
    parser.add_argument("--write-tokenizer", action="store_true")


def start(options: argparse.Namespace) -> SwitchedEngine:
    """Start an engine."""
    if options.write_tokenizer:
        write_tokenizer(options.target)
        raise SystemExit
    options.requests, options.steps = [256], 64
    own: dict[str, Any] = {
        "worker_extension_cls": "tests.tools.vllm_engine.Pricing",
        "skip_tokenizer_init": not {"grammar", "thinking"} & {*options.compare},
    }
    if "thinking" in options.compare:
        own["reasoning_config"] = {"reasoning_start_str": "ab", "reasoning_end_str": "cd"}
    options.engine = json.dumps(own | json.loads(options.engine))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    llm = engine_of(options, options.drafter)
    if options.price:
        llm.collective_rpc("price_rows")
    return SwitchedEngine(llm)
