"""The command line, on the models that come with the package."""

import re

import pytest

from specdecode import cli


@pytest.fixture(autouse=True)
def wide_and_plain(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def run(capsys, *arguments):
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def unmarked(text):
    """What was generated, without the marks of recovered, bonus and undrafted tokens."""
    return re.sub(
        r"\[-(.*?)-\]|\{\+(.*?)\+\}|\[=(.*?)=\]", lambda match: "".join(filter(None, match.groups())), text, flags=re.S
    )


def test_solve_shows_the_schedule(capsys):
    status, out, _ = run(capsys, "solve", "--rate", "0.69", "--drafts", "3")
    assert status == 0
    assert "base rate 0.908360   decay 0.850000" in out
    assert "mean rate 0.690000   acceptance length 3.0700" in out
    assert [float(joint) for joint in re.findall(r"\d +0\.\d+ +(0\.\d+) +█+", out)] == [0.908360, 0.701350, 0.460289]
    bars = [len(bar) for bar in re.findall("█+", out)]
    assert bars == [round(36 * joint) for joint in (0.908360, 0.701350, 0.460289)]


def test_solve_for_a_length_has_the_shape_that_the_library_has(capsys):
    _, out, _ = run(capsys, "solve", "--length", "2.5", "--drafts", "3")
    assert "base rate" not in out
    assert re.findall(r"\d +\S+ +(\d\.\d{6})", out) == ["1.000000", "0.500000", "0.000000"]
    _, out, _ = run(capsys, "solve", "--length", "1.75", "--drafts", "2", "--shape", "constant")
    assert "base rate 0.500000   decay 1.000000" in out


def test_bad_values_end_in_one_line_that_names_them(capsys, tmp_path):
    for arguments, message in [
        (("solve", "--rate", "1.5", "--drafts", "3"), "rate: expected a real number in [0, 1], got 1.5"),
        (("solve", "--rate", "0.5", "--drafts", "0"), "num_draft_tokens: expected a positive int, got 0"),
        (("generate", "--prompt", "x", "--temperature", "-1"), "temperature: expected a finite float >= 0, got -1.0"),
        (("generate", "--prompt", ""), "--prompt: expected at least one token, got ''"),
        (("generate", "--prompt", "x", "--target", str(tmp_path)), "--draft: expected a folder, as --target is given"),
        (("demo", "--target", str(tmp_path), "--draft", str(tmp_path)), "expected a folder with a model"),
    ]:
        status, out, err = run(capsys, *arguments)
        assert (status, out) == (2, "")
        assert message in err.replace("\n", " ")
        assert "Traceback" not in err


@pytest.mark.parametrize("method", ["strict", "probabilistic", "block"])
def test_generate_marks_what_became_of_each_draft(capsys, method):
    status, out, _ = run(capsys, "generate", "--prompt", "def main(", "--max-new-tokens", "40", "--method", method)
    assert status == 0
    assert "def main(" in out
    assert "[-" in out
    assert "{+" in out
    assert "Acceptance rate (%):" in out


def test_strict_says_the_same_whoever_drafts(capsys):
    texts = []
    for drafter in ((), ("--drafts", "1"), ("--prompt-lookup",)):
        _, out, _ = run(
            capsys, "generate", "--prompt", "class A:", "--max-new-tokens", "40", "--method", "strict", *drafter
        )
        start, end = out.index("class A:"), out.index("-------- Speculative")
        texts.append(unmarked(out[start:end]))
    assert texts[0] == texts[1] == texts[2]


def test_demo_compares_the_methods_and_says_that_strict_is_plain_decoding(capsys):
    status, out, _ = run(capsys, "demo", "--max-new-tokens", "24")
    assert status == 0
    for method in ("plain", "strict", "probabilistic", "block", "greedy", "prompt lookup", "synthetic"):
        assert re.search(rf"^ +{method} .*\d+ +\d+\.\d\dx", out, flags=re.M)
    # Given its drafts, no block is accepted less in the mean, so the gain is a mean of numbers >= 0.
    gain, error = map(float, re.search(r"^ +block .* (\d\.\d{3})±(\d\.\d{3}) ", out, flags=re.M).groups())
    assert 0 < error <= gain < 0.5
    assert "strict was identical to plain decoding, token for token (6 texts, 144 tokens)" in out
