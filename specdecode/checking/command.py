"""`specdecode check`: a verifier in a file, or one that is installed."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

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
    command.add_argument("subject", metavar="SUBJECT", help="what to check, see below")
    command.add_argument(
        "--draft",
        metavar="FILE:FUNCTION",
        help="a drafter: (draft_logits [n, V], *, temperature, seeds, positions, offset)",
    )
    command.add_argument(
        "--drafts", type=int, default=3, metavar="K", help="draft tokens per step (default %(default)s)"
    )
    command.add_argument(
        "--vocab", type=int, default=5, metavar="V", help="tokens of the vocabulary (default %(default)s)"
    )
    command.add_argument(
        "--requests", type=int, default=200_000, help="how many are verified in all (default %(default)s)"
    )
    command.add_argument("--seed", type=int, default=0, help="of the checker's random numbers (default %(default)s)")
    command.add_argument(
        "--tree",
        metavar="PARENTS",
        help="check a verifier of trees: the parent of each node, such as --tree=-1,0,0,1,1; it is called with "
        "(target_logits [n, N, V], token_ids [n, N], parents [N], ...)",
    )
    command.add_argument(
        "--allow",
        type=float,
        metavar="TV",
        help="the total variation of a token that the verifier may add, for a rule that is meant to be lossy",
    )
    command.add_argument("--only", metavar="NAME", help="ask one question alone, a name of the report's")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument(
        "--progress", action="store_true", default=None, help="show progress, also if standard error is no terminal"
    )


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
    try:
        from specdecode.checking.checker import check
        from specdecode.checking.subjects import load, load_function
    except ImportError as error:
        raise ValueError(f"check needs NumPy and SciPy ({error}): pip install numpy scipy") from None
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
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)
    return int(not report.passed)
