"""What the adapters of serving engines share: the methods that they take, and their count of steps left to the engine."""

import logging
from collections import Counter
from typing import Literal

EngineMethod = Literal["probabilistic", "block", "strict"]


class Fallbacks(Counter[str]):
    """How many steps were left to the engine, by reason. The 1st, 10th, 100th, ... step of each reason is logged.

    Example:
        >>> import logging
        >>> from specdecode.integrations.adapters import Fallbacks
        >>> fallbacks = Fallbacks(logging.getLogger("example"))
        >>> fallbacks.add("watermarks", "vLLM verifies such a step")
        >>> fallbacks.add("watermarks", "vLLM verifies such a step")
        >>> fallbacks
        Fallbacks({'watermarks': 2})
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self.logger = logger

    def add(self, reason: str, consequence: str) -> None:
        """Count one step; now and then log what happens to steps like it."""
        self[reason] += 1
        # Not the first alone: an engine's own warm-up makes steps with every feature before there is any request.
        if str(self[reason]).strip("0") == "1":
            self.logger.warning("specdecode: step %d with %s: %s", self[reason], reason, consequence)
