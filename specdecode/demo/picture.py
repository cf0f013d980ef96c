"""Draw the output of `specdecode demo` without its explanations: `python -m specdecode.demo.picture docs/demo.svg`."""

import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console

from specdecode.cli import parser
from specdecode.demo.comparison import compare_methods

COLUMNS = 77
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"


def main(path: str) -> None:
    """Run the demo with its defaults and write the picture."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=StringIO(),
        force_terminal=False,  # otherwise it would record the progress bars
        color_system="truecolor",
        highlight=False,
    )
    compare_methods(parser().parse_args(["demo"]), console)
    picture = console.export_svg(title="specdecode demo", unique_id="demo")
    # Without @font-face, which would load a font from another host.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)
    picture = picture.replace("Fira Code, monospace", FONTS)
    Path(path).write_text("\n".join(line.rstrip() for line in picture.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
