"""Checks a running server from outside: its tokens against the log-probabilities that it reports, over HTTP.

A request's first token is never a draft. So a one-token request gives the row after any text without speculation, and the
first tokens of the samples are the control: if they are wrong, the mistake is not in the verification.
"""

import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from specdecode.checking.checker import FALSE_ALARM
from specdecode.checking.findings import Finding
from specdecode.checking.report import Report
from specdecode.checking.server_statistics import RANKS, Context, Evidence, Row, make_row, prefix_fit, two_samples
from specdecode.checking.settings import Progress
from specdecode.checking.statistics import Fit, detectable

TEXTS = (
    "Rolls of a die:\n4\n1\n6\n3\n3\n5\n2\n1\n6\n4\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman. Every morning he went down to the",
    "A bag holds red, blue, green and yellow balls. Drawn: red. Drawn: green. Drawn: blue. Drawn: yellow. Drawn:",
    "The French Revolution began in 1789 and ended in 1799. Many of its ideas are still seen as the foundations of modern",
    "Name: Anna, age: 31\nName: Peter, age: 64\nName: Maria, age: 27\nName: John, age: 45\nName: Lucy, age: 58\nName:",
    "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return width *",
)
"""The default prompts. Some are logs of random draws, in which drafters that copy earlier text find text to copy."""

LOW_TEMPERATURE = 0.6
"""The temperature of every third prompt; the others have 1."""

BATCH = 16
"""The number of texts in a request to the server."""

NUM_TOKENS = 8
"""The number of tokens of a sample."""

MIN_SAMPLES = 40
"""A prefix that begins at least this many samples is compared with its one-token request."""

NUM_TESTS = 6
"""The number of tests of a run that compares two servers; each has an equal share of the false-alarm rate."""

Listed = dict[int, float]
"""The log-probabilities of the likeliest tokens, by token id; empty if the server reports none."""


class Server(NamedTuple):
    """A server's address, and the options of all requests."""

    url: str
    model: str
    top_logprobs: int
    timeout: float
    api_key: str | None

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request; errors say what to set."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            with urlopen(Request(self.url + path, json.dumps(body).encode(), headers), timeout=self.timeout) as answer:
                return dict(json.load(answer))
        except HTTPError as error:
            said = error.read(500).decode(errors="replace")
            hint = {401: "set api_key", 403: "set api_key", 404: "is the model in /v1/models?"}.get(error.code, "")
            hint = "set top_logprobs to what it allows" if "logprobs" in said else hint
            hint = "set prompts to lists of token ids" if path == "/tokenize" else hint
            raise ValueError(f"server: {self.url}{path} refused with {error.code}: {said} {hint}") from None
        except TimeoutError:
            raise ValueError(f"timeout: no answer from {self.url} in {self.timeout:g} s; set a longer one") from None
        except (OSError, HTTPException) as error:
            raise ValueError(f"server: no answer from {self.url}{path}: {error!r}; does it run there?") from None
        except (ValueError, TypeError):
            raise ValueError(f"server: expected JSON from {self.url}{path}; is it OpenAI-compatible?") from None

    def request(self, prompts: Any, temperature: float, max_tokens: int) -> dict[str, Any]:
        """Return the body of a request that samples from the whole distribution, whatever the server's defaults are."""
        sampling = {"temperature": temperature, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
        answer = {"logprobs": self.top_logprobs, "return_tokens_as_token_ids": True, "ignore_eos": True}
        return {"model": self.model, "prompt": prompts, "max_tokens": max_tokens, **sampling, **answer}

    def complete(self, prompts: Any, temperature: float, max_tokens: int) -> list[list[tuple[int, Listed]]]:
        """Return the tokens of each answer, each with its log-probabilities."""
        answer = self.post("/v1/completions", self.request(prompts, temperature, max_tokens))
        choices = sorted(answer.get("choices", []), key=lambda choice: int(choice["index"]))
        if not choices:
            raise ValueError(f"server: expected choices from {self.url}/v1/completions, got {str(answer)[:200]}")
        try:
            return [read(choice.get("logprobs")) for choice in choices]
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"server: expected OpenAI's or llama.cpp's log-probabilities: {error!r}") from None

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        body = {"model": self.model, "prompt": text, "content": text, "add_special": True}
        ids = list(self.post("/tokenize", body).get("tokens", []))
        if not ids:
            raise ValueError("server: its /tokenize gives no tokens; set prompts to lists of token ids")
        return ids

    def rows(self, texts: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Listed]:
        """Return the log-probabilities of the next token after each text, from one-token requests."""
        rows: list[Listed] = []
        for start in range(0, len(texts), BATCH):
            answers = self.complete([list(text) for text in texts[start : start + BATCH]], temperature, 1)
            rows += [listed for answer in answers for _, listed in answer if listed]
        if len(rows) != len(texts):
            raise ValueError(f"server: expected log-probabilities of {len(texts)} one-token requests, got {len(rows)}")
        return rows


def read(logprobs: Any) -> list[tuple[int, Listed]]:
    """Read log-probabilities, in the form of completions (vLLM) or of chats (llama.cpp)."""
    if not logprobs:
        raise ValueError("server: an answer has no log-probabilities; set the server to report them")
    if "content" in logprobs:
        entries = logprobs["content"]
        return [(each["id"], {top["id"]: top["logprob"] for top in each["top_logprobs"]}) for each in entries]
    rows = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    rows = [{id_in(name): value for name, value in (row or {}).items()} for row in rows]
    return list(zip(map(id_in, logprobs["tokens"]), rows))


def id_in(name: str) -> int:
    """Return the id in "token_id:17"."""
    if not name.startswith("token_id:"):
        raise ValueError(f"server: expected token ids in log-probabilities, got {name!r}: tokens may share a text")
    return int(name.removeprefix("token_id:"))


def choose(server: Server, text: str, unsure_first: bool) -> list[int]:
    """Return a prefix of a text: the last tokens are left out up to a position where the model is unsure.

    A position's score is the entropy of its row, at most 2 nats, times the probability of the listed tokens. With
    `unsure_first` the next position has the largest score. Otherwise the text's next token is likely, and the position
    after it has a large score.
    """
    ids = server.tokenize(text)
    texts = [ids[:end] for end in range(max(1, len(ids) - 6), len(ids) + 1)]
    rows = [make_row(listed, server.top_logprobs) for listed in server.rows(texts)]
    scores = [min(float(row.probs @ row.surprise()), 2.0) * (1 - row.probs[-1]) for row in rows]
    if not unsure_first and len(texts) > 1:
        likely = [row.probs[row.place(longer[-1])] for row, longer in zip(rows, texts[1:])]
        scores = [prob * score for prob, score in zip(likely, scores[1:])]
    return list(max(zip(scores, texts))[1])


class Run:
    """The samples of one server."""

    def __init__(self, server: Server, prompts: Sequence[list[int]], progress_line: Progress) -> None:
        self.server, self.prompts, self.progress_line = server, prompts, progress_line
        self.temperatures = [LOW_TEMPERATURE if prompt % 3 == 2 else 1.0 for prompt in range(len(prompts))]
        self.texts: list[Context] = []
        self.own = Evidence()  # tokens compared with the rows that were reported with them
        self.by_prefix = Evidence()  # tokens compared with the rows of one-token requests
        self.without_rows = 0  # the number of tokens that came without a row
        # Equal rows at two temperatures are raw: then the temperature must be applied here.
        plain, scaled = (server.rows(prompts[-1:], temperature)[0] for temperature in (1.0, LOW_TEMPERATURE))
        is_raw = all(abs(scaled.get(token, logprob) - logprob) < 0.1 for token, logprob in plain.items())
        self.row_temperatures = self.temperatures if is_raw else [1.0] * len(prompts)

    def collect(self, samples: int, threshold: float) -> None:
        """Collect `samples` samples, or a third of them if the sequential test of ranks and tokens fails by then."""
        started = time.monotonic()
        while len(self.texts) < samples:
            fails = not self.without_rows and math.exp(-self.own.best) <= threshold
            if fails and len(self.texts) >= samples / 3:  # enough to name the mistake
                break
            for prompt, temperature in enumerate(self.temperatures):
                for answer in self.server.complete([self.prompts[prompt]] * BATCH, temperature, NUM_TOKENS):
                    self.add(prompt, answer)
                done = len(self.texts)
                seconds = (time.monotonic() - started) / done * (samples - done)
                sees = detectable(len(RANKS) - 1, done * (NUM_TOKENS - 1), threshold)
                self.progress_line.done = done
                self.progress_line.say(f"{done} of {samples} samples, {seconds:.0f} s, TV {sees:.2f}")

    def add(self, prompt: int, answer: Sequence[tuple[int, Listed]]) -> None:
        """Add a sample; its first token belongs to the control."""
        text: Context = (prompt,)
        for index, (token, listed) in enumerate(answer):
            if index > 0 and listed:
                row = make_row(listed, self.server.top_logprobs, self.row_temperatures[prompt])
                self.own.add(row, token, text, self.temperatures[prompt], listed.get(token, 0.0))
            self.without_rows += index > 0 and not listed
            text = (*text, token)
        self.texts.append(text)

    def prefixes(self, first: int, last: int) -> tuple[Fit, str]:
        """Compare the tokens `first` to `last` of the samples with the rows of one-token requests.

        The first token of a sample is number 1. Only tokens after prefixes that `MIN_SAMPLES` samples share are compared.

        Returns:
            The test, and the largest difference in words.
        """
        counts: dict[Context, Counter[int]] = defaultdict(Counter)
        for text in self.texts:
            for end in range(first, min(last + 1, len(text))):
                counts[text[:end]][text[end]] += 1
        rows: dict[Context, Row] = {}
        for prompt, temperature in enumerate(self.temperatures):
            contexts = [each for each in counts if each[0] == prompt and counts[each].total() >= MIN_SAMPLES]
            texts = [[*self.prompts[prompt], *context[1:]] for context in contexts]
            for context, listed in zip(contexts, self.server.rows(texts, temperature)):
                rows[context] = make_row(listed, self.server.top_logprobs, self.row_temperatures[prompt])
                for token in counts[context].elements():
                    self.by_prefix.add(rows[context], token, context, temperature)
        return prefix_fit(counts, rows)

    def findings(self) -> tuple[list[Finding], list[str]]:
        """Return the tests of the samples, and notes about tests that cannot be made."""
        fit, seen = self.prefixes(2, NUM_TOKENS)
        control_fit, control = self.prefixes(1, 1)
        found = [Finding("prefixes", fit.p_value, "tokens after frequent texts, by one-token requests", seen, fit)]
        notes = []
        if self.without_rows:
            missing = f"{self.without_rows:,} tokens came without log-probabilities"
            notes.append(f"not asked: ranks, surprisal, bets: {missing}.")
        else:
            ranks, (p_value, more) = self.own.ranks(), self.own.surprisal()
            counts = [f"{rank}: {n:,} ({due:,.0f})" for rank, n, due in zip(RANKS, ranks.observed, ranks.expected)]
            seen = f"tokens of rank (and expected): {', '.join(counts)}"
            found += [
                Finding("ranks", ranks.fit.p_value, "the token's rank in its own row", seen, ranks.fit),
                Finding("surprisal", p_value, f"{more:+.3f} nats a token above the entropy of its row"),
                Finding("bets", math.exp(-self.own.best), "bets on ranks and tokens; valid whenever sampling stops"),
            ]
        found.append(Finding("first token", control_fit.p_value, "never a draft: the control", control, control_fit))
        return found, notes


def check_server(
    url: str,
    model: str,
    *,
    against: str | None = None,
    samples: int = 960,
    prompts: Sequence[str | Sequence[int]] = TEXTS,
    top_logprobs: int = 20,
    timeout: float = 120.0,
    api_key: str | None = None,
    progress: bool | None = None,
) -> Report:
    """Compare the tokens that a running server samples with the log-probabilities that it reports.

    Args:
        url: the address of a server with OpenAI's `/v1/completions`, such as http://127.0.0.1:8000.
        model: the model's name on the server.
        against: the address of another server of the model, such as one without speculation: both must give equal texts.
        samples: the number of continuations of eight tokens, rounded up to a multiple of 16 for each prompt. A third of them
            is enough if the check `bets`, a sequential test, fails by then.
        prompts: texts, whose beginnings are continued, or lists of token ids. Every third is continued at temperature 0.6.
        top_logprobs: the number of log-probabilities to ask for with each token; most servers allow 20.
        timeout: the longest time to wait for an answer, in seconds.
        api_key: sent as a bearer token.
        progress: whether to show progress on standard error; None: if it is a terminal.

    Returns:
        The report; `report.passed` says whether everything is right.

    Raises:
        ValueError: the server cannot be checked; the message says what to set.
    """
    started = time.perf_counter()
    if samples < 1 or not prompts:
        raise ValueError(f"samples: expected at least 1, and prompts, got {samples!r} and {prompts!r}")
    samples = math.ceil(samples / len(prompts) / BATCH) * len(prompts) * BATCH
    progress_line = Progress(samples, sys.stderr.isatty() if progress is None else progress)
    base = [each.rstrip("/").removesuffix("/v1") for each in (url, against or url)]
    server = Server(base[0], model, top_logprobs, timeout, api_key)
    reference = Server(base[1], *server[1:])
    if any(against and isinstance(text, str) and server.tokenize(text) != reference.tokenize(text) for text in prompts):
        raise ValueError(f"against: expected the tokenizer of {url}, got another; set a server of the same model")
    progress_line.say("choosing prompts")
    # The first token after a prompt is the control, so most prompts have the unsure position at the second.
    ids = [choose(server, text, i % 4 == 1) if isinstance(text, str) else list(text) for i, text in enumerate(prompts)]
    run, threshold = Run(server, ids, progress_line), FALSE_ALARM / NUM_TESTS
    run.collect(samples, threshold)
    progress_line.say("one-token requests")
    found, notes = run.findings()
    if against:
        other = Run(reference, ids, progress_line)
        other.collect(len(run.texts), 0.0)
        fit = two_samples(run.texts, other.texts)
        found.append(Finding("against", fit.p_value, f"texts of two to four tokens, also of {against}", fit=fit))
    progress_line.end()
    checks = [each.judged(threshold) for each in found]
    suspects: list[str] = []
    if not all(check.passed for check in checks):
        suspects = (run.by_prefix if run.without_rows else run.own).suspects()
        body = json.dumps({**server.request(ids[0], 1.0, NUM_TOKENS), "n": BATCH})
        notes.append(f"a request: curl {server.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'")
    size = {"prompts": len(ids), "samples": len(run.texts), "tokens": sum(len(text) - 1 for text in run.texts)}
    return Report(checks, suspects, notes, f"{model} at {url}", size, threshold, time.perf_counter() - started)
