"""`specdecode check`: a verifier in a file, one that is installed, or a running server."""

import json
import typing
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

if typing.TYPE_CHECKING:
    from specdecode.checking.report import Report

EPILOG = """\
SUBJECT is file.py:function, or one of specdecode:METHOD[:BACKEND] (probabilistic, block, strict; eager, triton),
transformers, vllm, vllm:block, sglang, sglang:block, flashinfer, or a rule for --allow: mixture, typical, relaxed, fly.
The function takes NumPy arrays
(target_logits [n, K + 1, V], draft_token_ids [n, K], draft_logits [n, K, V], *, temperature, seeds [n], positions [n]),
or only those that it needs, and returns [n, K + 1] ids: the accepted drafts, one more token, then -1. Exit status: 0 right,
1 wrong, 2 cannot run."""


def add_options(command: ArgumentParser) -> None:
    """Add the options of `check`."""
    command.epilog = EPILOG
    add = command.add_argument
    add("subject", metavar="SUBJECT", nargs="?", help="what to check, see below")
    drafter = "a drafter: (draft_logits [n, V], *, temperature, seeds, positions, offset)"
    add("--draft", metavar="FILE:FUNCTION", help=drafter)
    add("--drafts", type=int, default=3, metavar="K", help="draft tokens per step (default %(default)s)")
    add("--vocab", type=int, default=5, metavar="V", help="tokens of the vocabulary (default %(default)s)")
    add("--requests", type=int, default=200_000, help="how many are verified in all (default %(default)s)")
    add("--seed", type=int, default=0, help="of the checker's random numbers (default %(default)s)")
    tree = "check a verifier of trees: the parent of each node, such as --tree=-1,0,0,1,1; it is called with "
    add("--tree", metavar="PARENTS", help=f"{tree}(target_logits [n, N, V], token_ids [n, N], parents [N], ...)")
    lossy = "the total variation of a token that the verifier may add, for a rule that is meant to be lossy"
    add("--allow", type=float, metavar="TV", help=lossy)
    add("--only", metavar="NAME", help="ask one question alone, a name of the report's")
    add("--json", action="store_true", help="print the report as JSON")
    add("--junit", type=Path, metavar="FILE", help="also write the report to FILE as JUnit XML, for CI")
    progress = "show progress, also if standard error is no terminal"
    add("--progress", action="store_true", default=None, help=progress)
    add = command.add_argument_group("a running server, in place of SUBJECT").add_argument
    add("--server", metavar="URL", help="with /v1/completions and log-probabilities")
    add("--model", metavar="NAME", help="the model's name on the server")
    add("--against", metavar="URL", help="another server of the model, such as one without speculation")
    add("--samples", type=int, default=960, help="texts of eight tokens (default %(default)s)")
    add("--top-logprobs", type=int, default=20, help="to ask for (default %(default)s)")
    add("--timeout", type=float, default=120, help="seconds for a request (default %(default)s)")
    add("--api-key", help="sent as a bearer token")


def parents_of(text: str) -> list[int]:
    """Return the parents of a tree, from numbers with commas."""
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--tree: expected the parent of each node, such as -1,0,0,1,1, got {text!r}") from None


def run(options: Namespace) -> int:
    """Check, print the report and return the exit status.

    Raises:
        ValueError: it cannot run.
    """
    if (options.subject is None) == (options.server is None):
        raise ValueError("check: expected a SUBJECT or --server URL, and not both")
    if options.server and not options.model:
        raise ValueError("model: expected the model's name on the server, got none")
    try:
        from specdecode.checking.checker import check
        from specdecode.checking.server import check_server
        from specdecode.checking.subjects import load, load_function
    except ImportError as error:
        raise ValueError(f"check needs NumPy and SciPy ({error}): pip install numpy scipy") from None
    if options.server:
        names = ("against", "samples", "top_logprobs", "timeout", "api_key", "progress")
        report = check_server(options.server, options.model, **{name: getattr(options, name) for name in names})
        return show(report, options)
    files: dict[Path, ModuleType] = {}
    subject = load(options.subject, files)
    tree = None if options.tree is None else parents_of(options.tree)
    verify, draft = (subject.verify, subject.draft) if tree is None else (subject.tree, None)
    if verify is None:
        raise ValueError(f"subject: expected a verifier of trees, such as specdecode:strict, got {options.subject!r}")
    draft = load_function("draft", options.draft, files) if options.draft else draft
    report = check(
        verify,
        draft,
        num_draft_tokens=options.drafts,
        vocab_size=options.vocab,
        requests=options.requests,
        seed=options.seed,
        only=options.only,
        tree=tree,
        allow=options.allow,
        progress=options.progress,
        name=subject.name,
    )
    return show(report, options)


def show(report: "Report", options: Namespace) -> int:
    """Print a report, write its file, and return the exit status."""
    if options.junit:
        from specdecode.checking.junit import junit

        options.junit.parent.mkdir(parents=True, exist_ok=True)
        options.junit.write_bytes(junit(report))
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)
    return int(not report.passed)
