"""The command line: `specdecode demo`, `specdecode generate`, `specdecode solve` and `specdecode check`.

This file only reads the options. The code that imports PyTorch is in `commands` and `demo.comparison`, which are imported
when a command runs; `check` needs no PyTorch.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from specdecode import __version__
from specdecode.checking import command
from specdecode.demo import TARGET

METHODS = ("strict", "probabilistic", "block")
SHAPES = ("decay", "constant", "minimum_variance")

BROKEN_PIPE = 141
"""The exit status after a closed pipe: 128 + SIGPIPE, as of a command that this signal ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    replace_unencodable()
    try:
        return run(parser().parse_args(arguments))
    except BrokenPipeError:  # such as `specdecode check ... | head -1`
        return BROKEN_PIPE
    finally:
        discard_unwritten()


def run(options: argparse.Namespace) -> int:
    """Run one command; return its exit status."""
    try:
        status = 0
        if options.run == "run_check":
            status = command.run(options)
        else:
            commands = import_module("specdecode.commands")
            module = import_module("specdecode.demo.comparison") if options.run == "run_demo" else commands
            getattr(module, options.run)(options, commands.make_console())
        if sys.stdout is not None:
            sys.stdout.flush()  # its errors are handled here, not when the interpreter ends
        return status
    except KeyboardInterrupt:
        if sys.stdout is not None and sys.stdout.isatty():
            print()  # ends a partially written line
        complain("interrupted")
        return 130
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        complain(by_option(str(error), options))
        return 2


def complain(message: str) -> None:
    """Write a line to standard error. A failure is ignored, because the exit status also reports the error."""
    try:
        if sys.stderr is not None:  # with None, `print` would use standard output
            print(f"specdecode: {message}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        raise
    except OSError:
        return


def replace_unencodable() -> None:
    """Make standard output write "?" for a character that its encoding lacks. (Standard error writes its code.)"""
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="replace")


def discard_unwritten() -> None:
    """Discard output that cannot be written; otherwise the interpreter tries again at exit, and shows the error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def by_option(message: str, options: argparse.Namespace) -> str:
    """Return an error message with the option's name in place of the argument's.

    >>> by_option("top_k: expected an int >= 0, got -1", argparse.Namespace(top_k=-1))
    '--top-k: expected an int >= 0, got -1'
    """
    argument, colon, rest = message.partition(":")
    for name in (argument, argument.removesuffix("s")):  # seeds are given as --seed
        if name in vars(options) and name != "subject":  # not an option
            return f"--{name.replace('_', '-')}{colon}{rest}"
    return message


def prompt(argument: str) -> str:
    r"""Return a text from the command line; bytes that the locale's encoding lacks are read as UTF-8.

    >>> prompt("\udcc3\udca9") == "\u00e9"
    True
    """
    return argument.encode(errors="surrogateescape").decode(errors="replace")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="specdecode", description="Verification for speculative decoding.")
    top.add_argument("--version", action="version", version=f"specdecode {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="see what drafts save, with two small models or with yours")
    add_model_options(demo)
    demo.add_argument(
        "--prompt",
        type=prompt,
        action="append",
        metavar="TEXT",
        help="the text to continue; may be repeated (default: six beginnings of Python code)",
    )
    demo.add_argument(
        "--max-new-tokens", type=int, default=128, help="of each text; 4 texts per prompt (default %(default)s)"
    )
    demo.set_defaults(run="run_demo")

    generate = commands.add_parser("generate", help="continue a prompt and show which drafts are accepted")
    add_model_options(generate)
    generate.add_argument("--prompt", type=prompt, required=True, metavar="TEXT", help="the text to continue")
    generate.add_argument("--max-new-tokens", type=int, default=200, help="at most (default %(default)s)")
    generate.add_argument("--method", choices=METHODS, default="probabilistic", help="(default %(default)s)")
    generate.add_argument(
        "--prompt-lookup", action="store_true", help="draft from the text so far, without a draft model"
    )
    generate.set_defaults(run="run_generate")

    solve = commands.add_parser("solve", help="show the schedule of synthetic acceptance for a mean rate or length")
    goal = solve.add_mutually_exclusive_group(required=True)
    goal.add_argument("--rate", type=float, help="acceptance rate: accepted / drafted tokens, in [0, 1]")
    goal.add_argument("--length", type=float, help="mean emitted tokens per step, in [1, draft tokens + 1]")
    solve.add_argument("--num-draft-tokens", type=int, required=True, metavar="K", help="draft tokens per step")
    solve.add_argument("--shape", choices=SHAPES, help="(default: decay for a rate, minimum_variance for a length)")
    solve.add_argument("--min-decay", type=float, default=0.85, help="of the shape decay (default %(default)s)")
    solve.set_defaults(run="run_solve")

    check = commands.add_parser("check", help="tell what is wrong with a verifier, yours or an engine's")
    command.add_options(check)
    check.set_defaults(run="run_check")
    return top


def add_model_options(command: argparse.ArgumentParser) -> None:
    """Add the options that `demo` and `generate` share."""
    folder: dict[str, Any] = {"type": Path, "metavar": "FOLDER"}
    command.add_argument(
        "--target", **folder, default=TARGET, help="the target model, in Hugging Face format (default: the one shipped)"
    )
    draft_help = "the draft model, with the target's tokenizer (default: the one shipped, for the shipped target)"
    command.add_argument("--draft", **folder, help=draft_help)
    command.add_argument(
        "--num-draft-tokens", type=int, default=3, metavar="K", help="draft tokens per step (default %(default)s)"
    )
    command.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default %(default)s)")
    command.add_argument(
        "--top-k",
        type=int,
        help="keep the TOP_K most likely tokens (default: the target's generation config, else all)",
    )
    command.add_argument(
        "--top-p",
        type=float,
        help="keep the most likely tokens until their probability reaches TOP_P (default: as for --top-k)",
    )
    command.add_argument(
        "--min-p",
        type=float,
        help="keep tokens at least MIN_P times as likely as the most likely token (default: as for --top-k)",
    )
    command.add_argument("--seed", type=int, default=0, help="of the noise (default %(default)s)")
    command.add_argument("--device", default="cpu", help="where the models run, such as cuda (default %(default)s)")
