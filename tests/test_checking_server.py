"""A running server is checked from outside: a right one passes, mistakes are seen and named, errors say what to set.

The server is ours, with a table as its model; the seeds are fixed. A right server fails with probability 1e-6, and gives a
p-value below the .01 of the first test in one of twenty runs.
"""

import json
import subprocess
import sys
import threading

import pytest

from specdecode import cli
from specdecode.checking import check_server
from tests.support.served import MISTAKES, Model, serving

TABLE = [[1], [2, 3], [4], [5], [6], [7]]
"""Prompts of ids, which are not chosen."""


def failed(report):
    return {check.name for check in report.checks if not check.passed}


@pytest.fixture(scope="module")
def right():
    """Serve a right model twice, with other random numbers."""
    with serving(Model()) as url, serving(Model(again=1)) as other:
        yield url, other


def test_a_right_server_passes_on_the_command_line(right):
    code = "import sys; sys.modules['torch'] = None; from specdecode.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["check", "--server", f"{right[0]}/v1/", "--model", "table", "--against", right[1], "--samples", "280"]
    command = [sys.executable, "-c", code, *options, "--progress", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["settings"] == {"prompts": 6, "samples": 288, "tokens": 2304}
    names = ["prefixes", "ranks", "surprisal", "bets", "first token", "against"]
    assert [check["name"] for check in report["checks"]] == names
    assert min(check["p_value"] for check in report["checks"]) > 0.01
    assert "288 of 288 samples, 0 s, TV 0.10" in done.stderr


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen_and_named(mistake):
    with serving(Model(mistake=mistake)) as url:
        report = check_server(url, "table", samples=600)
    assert {"ranks", "surprisal"} <= failed(report)
    assert report.suspects == [mistake]
    assert report.settings["samples"] < 600 or mistake == "bonus_from_another_row"  # the bets stop
    assert f"curl {url}/v1/completions" in " ".join(str(report).split())


def test_without_log_probabilities_of_drafts_the_prefixes_tell():
    with serving(Model(mistake="accept_everything"), rows="first") as url:
        report = check_server(url, "table", samples=600, prompts=TABLE)
    assert failed(report) == {"prefixes"}
    assert "not asked: ranks, surprisal, bets" in report.notes[0]
    assert "after prompt" in report.checks[0].detail


def test_the_control_tells_sampling_from_verification():
    with serving(Model(mistake="first_token_greedy")) as url:
        report = check_server(url, "table", samples=300, prompts=TABLE)
    assert failed(report) == {"first token"}
    assert report.suspects == []


def test_two_servers_are_compared(right):
    with serving(Model(mistake="accept_everything")) as other:
        report = check_server(right[0], "table", against=other, samples=480, prompts=[[1]])
    assert failed(report) == {"against"}


def test_a_text_of_one_token_is_a_prompt(right):
    assert check_server(right[0], "table", samples=16, prompts=["a"]).settings["samples"] == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"status": 400}, "refused with 400.*set top_logprobs"),
        ({"status": 401}, "refused with 401.*set api_key"),
        ({"status": 404}, "refused with 404.*is the model in /v1/models?"),
        ({"rows": "text"}, "expected token ids in log-probabilities, got '.': tokens may share a text"),
        ({"rows": "none"}, "an answer has no log-probabilities"),
        ({"wait": threading.Event()}, "timeout: no answer from .* in 0.2 s; set a longer one"),
    ],
)
def test_errors_say_what_to_set(options, message):
    with serving(Model(), **options) as url, pytest.raises(ValueError, match=message):
        check_server(url, "table", timeout=0.2 if "wait" in options else 60)


def test_servers_with_other_tokenizers_are_not_compared(right):
    with serving(Model(), shift=1) as other, pytest.raises(ValueError, match="against: expected the tokenizer of"):
        check_server(right[0], "table", against=other, samples=16, prompts=["a text"])


def test_errors_of_the_command_name_its_options(capsys):
    with serving(Model()) as url:
        pass
    options = ["check", "--server", url]
    assert cli.main([*options, "--model", "table"]) == 2
    assert f"--server: no answer from {url}/tokenize" in capsys.readouterr().err
    assert cli.main(options) == 2
    assert "--model: expected the model's name" in capsys.readouterr().err
    assert cli.main(["check"]) == 2
    assert "expected a SUBJECT or --server URL" in capsys.readouterr().err
