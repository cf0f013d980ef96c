"""The noise contract that every backend keeps: change anything here and every seeded output changes.

The counter of a number is (index, position low word, position high word, domain). The index is a block or token id; in
accept decisions it is 0, but in those of block verification the draft's offset in its step.
"""

from enum import IntEnum

BLOCK_SIZE = 1024
"""Tokens per block of two-level selection.

Measured on an H200, blocks of 1,024, 2,048 and 4,096 stream rows equally fast, to within a few percent
(tests/benchmarks/records/block_size.json); the smallest draws the fewest numbers and couples target and draft best.
"""


class Domain(IntEnum):
    """What a number is for: the last word of its Philox counter."""

    ACCEPT = 0
    SELECT_BLOCK = 1
    SELECT_TOKEN = 2
    DRAFT_BLOCK = 3
    DRAFT_TOKEN = 4


SELECT = (Domain.SELECT_BLOCK, Domain.SELECT_TOKEN)
"""Domains of a token that the target emits, and of drafts that are to share its noise (strict)."""

DRAFT = (Domain.DRAFT_BLOCK, Domain.DRAFT_TOKEN)
"""Domains of drafts that must not share the target's noise (every other method)."""


def draft_domains(offset: int) -> tuple[int, int]:
    """Return `DRAFT` for the draft at an offset of its step: position and offset together say which step it is."""
    block_domain, token_domain = DRAFT
    return block_domain + (offset << 8), token_domain + (offset << 8)
