"""Tell any verifier what is wrong with it: `check(verify)`, on the command line `specdecode check file.py:verify`.

It imports NumPy and SciPy alone.
"""

from specdecode.checking.checker import check
from specdecode.checking.report import Check, Report

__all__ = ["Check", "Report", "check"]
