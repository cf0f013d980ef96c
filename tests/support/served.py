"""A small server of completions whose model is a seeded table, with speculation that is right or has a mistake."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

VOCAB = 24
NUM_DRAFTS = 3
MISTAKES = (
    "recovered_from_target", "accept_everything", "bonus_from_another_row", "temperature_ignored", "always_greedy",
)  # fmt: skip


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class Model:
    """A table: the row after a text depends on its last two tokens."""

    def __init__(self, seed=0, mistake="", again=0):
        table = np.random.default_rng(seed)
        self.target = 2 * table.normal(size=(VOCAB, VOCAB, VOCAB))
        self.draft = 0.3 * self.target + table.normal(size=self.target.shape)
        self.random, self.mistake = np.random.default_rng(seed + 1 + again), mistake

    def pick(self, probs):
        return int(min(np.searchsorted(probs.cumsum(), self.random.random() * probs.sum(), side="right"), VOCAB - 1))

    def step(self, text, temperature):
        """Return one step's tokens: token verification, or with the mistake."""
        t = 1.0 if self.mistake == "temperature_ignored" else temperature
        if self.mistake == "always_greedy":
            t = 1e-3
        new, drafts = list(text), []
        for _ in range(NUM_DRAFTS):
            q = softmax(self.draft[new[-2], new[-1]] / t)
            drafts.append((self.pick(q), q))
            new.append(drafts[-1][0])
        new = list(text)
        for x, q in drafts:
            p = softmax(self.target[new[-2], new[-1]] / t)
            if self.mistake != "accept_everything" and self.random.random() * q[x] > p[x]:
                recovered = p if self.mistake == "recovered_from_target" else np.maximum(p - q, 0)
                return [*new[len(text) :], self.pick(recovered)]
            new.append(x)
        back = 1 if self.mistake == "bonus_from_another_row" else 0
        row = self.target[new[-2 - back], new[-1 - back]]
        return [*new[len(text) :], self.pick(softmax(row / t))]

    def complete(self, prompt, temperature, length):
        """Return a text; its first token is no draft."""
        text = [0, *prompt]
        first = 1e-3 if self.mistake == "first_token_greedy" else temperature
        text.append(self.pick(softmax(self.target[text[-2], text[-1]] / first)))
        while len(text) < 1 + len(prompt) + length:
            text += self.step(text, temperature)
        return text[1 + len(prompt) : 1 + len(prompt) + length]

    def row(self, text):
        """Return the log-probabilities after a text, at temperature 1."""
        text = [0, *text]
        return np.log(softmax(self.target[text[-2], text[-1]]))


def answer(model, question, rows):
    """Return the answer to a request.

    `rows`: "all", as vLLM does; "text", with texts for ids; "first": first tokens alone, in llama.cpp's form; "none".
    """
    choices = []
    for index, prompt in enumerate(question["prompt"]):
        new = model.complete(prompt, question["temperature"], question["max_tokens"])
        listed = []
        for place, token in enumerate(new):
            row = model.row([*prompt, *new[:place]])
            top = {*np.argsort(-row)[: question["logprobs"]].tolist(), token}
            listed.append({i: float(row[i]) for i in top if rows != "first" or not place})
        if rows == "first":
            tops = [[{"id": i, "logprob": value} for i, value in row.items()] for row in listed]
            logprobs = {"content": [{"id": token, "top_logprobs": top} for token, top in zip(new, tops)]}
        else:
            name = "abcdefghijklmnopqrstuvwx".__getitem__ if rows == "text" else "token_id:{}".format
            named = [{name(i): value for i, value in row.items()} for row in listed]
            logprobs = {"tokens": [name(token) for token in new], "top_logprobs": named}
        choices.append({"index": index, "logprobs": logprobs if rows != "none" else None})
    return {"choices": choices}


@contextmanager
def serving(model=None, rows="all", status=200, wait=None, shift=0) -> Iterator[str]:
    """Serve a model; yield the address.

    `status`: refuse all completions; `wait`: an event to wait for before answering; `shift`: use another tokenizer.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if wait is not None:
                wait.wait(1)
            code, reply = 200, {}
            if self.path == "/tokenize":
                reply = {"tokens": [(ord(letter) + shift) % VOCAB for letter in question["prompt"]]}
            elif status != 200:
                code, reply = status, {"error": "at most 5 logprobs" if status == 400 else "no"}
            else:
                reply = answer(model, question, rows)
            data = json.dumps(reply).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a client that no longer waits
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
