"""The noise contract of all backends: a change here changes every seeded output.

The counter of a number is (index, position low word, position high word, domain). The index is a block or token id. In
accept decisions it is 0, except in block verification, where it is the draft's offset in its step.
"""

from enum import IntEnum

BLOCK_SIZE = 1024
"""Tokens per block of two-level selection.

Measured on an H200, blocks of 1,024, 2,048 and 4,096 stream rows equally fast, to within a few percent
(tests/benchmarks/records/block_size.json). The smallest needs the fewest random numbers, and with shared noise target and
draft agree most often.
"""


class Domain(IntEnum):
    """The use of a random number: the last word of its Philox counter."""

    ACCEPT = 0
    SELECT_BLOCK = 1
    SELECT_TOKEN = 2
    DRAFT_BLOCK = 3
    DRAFT_TOKEN = 4


# Plain ints, because compiled code adds to them.
SELECT = (int(Domain.SELECT_BLOCK), int(Domain.SELECT_TOKEN))
"""Domains of a token that the target emits, and of drafts that share its noise (strict)."""

DRAFT = (int(Domain.DRAFT_BLOCK), int(Domain.DRAFT_TOKEN))
"""Domains of drafts that must not share the target's noise (every other method)."""


def draft_domains(offset: int) -> tuple[int, int]:
    """Return the domains of the draft at an offset in its step, `DRAFT` for offset 0.

    The offset is shifted by 8 bits, so that the domains of two offsets are never the same. Position and offset together
    identify the step, so drafts of different steps have different noise.
    """
    block_domain, token_domain = DRAFT
    return block_domain + (offset << 8), token_domain + (offset << 8)
