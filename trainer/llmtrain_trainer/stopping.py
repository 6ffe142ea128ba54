"""SIGTERM: finish the step, checkpoint, leave."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Remembers a SIGTERM. Ranks agree on it in the collective that every step has anyway."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """From here on SIGTERM asks for a checkpoint. Before, with nothing to save yet, it just ends the rank."""
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
