"""The font of formulas: a subset of STIX Two Math for the characters of pages, made when the site is built.

The font (SIL Open Font License 1.1) comes with the ziamath package. Without it, formulas use the mathematics font of the
reader's system.
"""

from importlib.util import find_spec
from pathlib import Path

FONT = Path(__file__).parent.parent / "fonts" / "math.woff2"
"""The path that the stylesheet expects; not under version control."""

CHARACTERS = [
    (0x0020, 0x007E),  # Latin
    (0x00A0, 0x00D7),
    (0x0391, 0x03D6),  # Greek
    (0x2016, 0x2033),  # dots, primes
    (0x2061, 0x2064),  # invisible operators
    (0x2102, 0x2133),  # letters outside the mathematical alphabets
    (0x2190, 0x21D5),  # arrows
    (0x2200, 0x22F1),  # operators
    (0x2308, 0x230B),  # floor, ceiling
    (0x23DE, 0x23DF),  # braces over and under
    (0x25A0, 0x25A1),  # squares, which end proofs
    (0x27E8, 0x27E9),  # angle brackets
    (0x27F5, 0x27FA),  # long arrows
    (0x1D434, 0x1D467),  # italic letters
    (0x1D49C, 0x1D4B5),  # script capitals
    (0x1D538, 0x1D551),  # double-struck capitals
    (0x1D670, 0x1D6A3),  # letters of one width
    (0x1D7F6, 0x1D7FF),  # digits of one width
    (0x1D6A4, 0x1D71B),  # dotless letters, bold and italic Greek
]
"""Ranges of code points, both ends included."""


def write_font() -> None:
    """Write the font, unless it exists and is newer than this file."""
    if FONT.exists() and FONT.stat().st_mtime > Path(__file__).stat().st_mtime:
        return
    from fontTools import subset

    package = find_spec("ziamath")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the ziamath package, which has the font of formulas, is not installed")
    options = subset.Options(flavor="woff2", hinting=False, layout_features=["ssty", "dtls", "flac"])
    font = subset.load_font(str(Path(package.origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"), options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=[code for first, last in CHARACTERS for code in range(first, last + 1)])
    subsetter.subset(font)
    FONT.parent.mkdir(exist_ok=True)
    part = FONT.with_suffix(".part")
    subset.save_font(font, str(part), options)
    part.replace(FONT)  # atomically: two builds may run at the same time
