"""`specdecode check`: a verifier in a file, or one that is installed."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import ModuleType

EPILOG = """\
SUBJECT is file.py:function, or one of specdecode:METHOD[:BACKEND] (probabilistic, block, strict; eager, triton),
transformers, vllm, vllm:block, sglang, sglang:block, flashinfer. The function takes NumPy arrays
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
    command.add_argument("--only", metavar="NAME", help="ask one question alone, a name of the report's")
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument(
        "--junit", type=Path, metavar="FILE", help="also write the report to FILE as JUnit XML, for CI"
    )
    command.add_argument(
        "--progress", action="store_true", default=None, help="show progress, also if standard error is no terminal"
    )


def run(options: Namespace) -> int:
    """Check, print the report and return the exit status.

    Raises:
        ValueError: it cannot run.
    """
    try:
        from specdecode.checking.checker import check
        from specdecode.checking.junit import junit
        from specdecode.checking.subjects import load, load_function
    except ImportError as error:
        raise ValueError(f"check needs NumPy and SciPy ({error}): pip install numpy scipy") from None
    files: dict[Path, ModuleType] = {}
    subject = load(options.subject, files)
    draft = load_function("draft", options.draft, files) if options.draft else subject.draft
    report = check(
        subject.verify,
        draft,
        num_draft_tokens=options.drafts,
        vocab_size=options.vocab,
        requests=options.requests,
        seed=options.seed,
        only=options.only,
        progress=options.progress,
        name=subject.name,
    )
    if options.junit:
        options.junit.parent.mkdir(parents=True, exist_ok=True)
        options.junit.write_bytes(junit(report))
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)
    return int(not report.passed)
