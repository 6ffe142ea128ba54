"""What a rank is doing now, in a file of 288 bytes that its agent reads at any moment.

The file is mapped into the rank's memory: a beat costs microseconds and needs no thread, and the newest one can be read
whatever state the rank is in. There are two slots, written in turn, each with a checksum: a reader takes the newest
whole one, also where the rank was stopped in the middle of writing the other.
"""

from __future__ import annotations

import faulthandler
import mmap
import signal
import struct
import time
import zlib
from collections import deque
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from llmtrain_api.sync_beat import STEP_PHASES
from llmtrain_trainer.owntime import OwnClock, OwnTime

STACKS_SIGNAL = signal.SIGUSR2
REMEMBERED = 256
SHORTEST_CHECKPOINT_SECONDS = 0.001
"""After most steps no checkpoint is due: these tell nothing of how long one takes."""
_BEAT = struct.Struct("<Qqddd q32s q5d")
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 144
_FILE_BYTES = 2 * _SLOT_BYTES
_READ_TRIES = 8


def beat_file(folder: Path, local_rank: int) -> Path:
    """Return where the rank's beat lies in the folder of its attempt."""
    return folder / f"rank-{local_rank}.beat"


def stacks_file(folder: Path, local_rank: int) -> Path:
    """Return where the rank's stacks lie in the folder of its attempt."""
    return folder / f"rank-{local_rank}.stacks"


def dump_stacks_at_signal(file: str) -> None:
    """Append the stacks of all threads to the file at each STACKS_SIGNAL, whatever the rank is doing.

    The handler runs in C without the interpreter's lock: it answers also for a rank that is stuck in a collective.

    Raises:
        OSError: the file cannot be opened.
    """
    faulthandler.register(STACKS_SIGNAL, open(file, "ab"), all_threads=True)  # noqa: SIM115 - open for life


@dataclass(frozen=True)
class Reading:
    """One beat, as read."""

    phase: str
    step: int
    since: float
    """time.monotonic(), which is one clock for all processes of a machine."""
    step_p99: float
    """Seconds, of the newest steps but the first one, without their checkpoints."""
    checkpoint_p99: float
    """Seconds for which the newest checkpoints held up training; 0 where there was none."""
    measured_steps: int
    """How many steps step_p99 is of."""
    stage: int = 0
    """The rank's place in its pipeline: only ranks of one stage have equal work."""
    own: OwnTime = field(default_factory=OwnTime)

    @property
    def in_step(self) -> bool:
        return self.phase in STEP_PHASES


class Heartbeat:
    """The rank's side: `enter` at the beginning of each phase."""

    def __init__(self, file: str = "") -> None:
        """Without a file the beats go nowhere.

        Raises:
            OSError: the file cannot be written.
        """
        self._memory = mmap.mmap(-1, _FILE_BYTES)
        if file:
            with open(file, "w+b") as stream:
                stream.truncate(_FILE_BYTES)
                self._memory = mmap.mmap(stream.fileno(), _FILE_BYTES)
        self._beats = 0
        self.stage = 0
        self.own = OwnClock()
        self._phase, self._since = "", time.monotonic()
        self._step, self._step_since, self._checkpoint_seconds = 0, 0.0, 0.0
        self._first_step = True
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._checkpoints: deque[float] = deque(maxlen=REMEMBERED)
        self._step_p99 = self._checkpoint_p99 = 0.0

    def enter(self, phase: str, step: int | None = None) -> None:
        """Say that this phase begins now; with a step, that this step does."""
        now = time.monotonic()
        if self._phase == "checkpoint":
            self._left_checkpoint(now - self._since)
        self.own.left(self._phase, now - self._since)
        if step is not None:
            self._begin_step(step, now)
        self._phase, self._since = phase, now
        self._write()

    def _left_checkpoint(self, seconds: float) -> None:
        self._checkpoint_seconds += seconds
        if seconds >= SHORTEST_CHECKPOINT_SECONDS:
            self._checkpoints.append(seconds)
            self._checkpoint_p99 = _p99(self._checkpoints)

    def _begin_step(self, step: int, now: float) -> None:
        if self._step:
            self.own.step_begins(now)
        if self._step and self._first_step:
            self._first_step = False  # it compiles, and says nothing of the others
        elif self._step:
            self._steps.append(now - self._step_since - self._checkpoint_seconds)
            self._step_p99 = _p99(self._steps)
        self._step, self._step_since, self._checkpoint_seconds = step, now, 0.0

    def _write(self) -> None:
        self._beats += 1
        beat = _BEAT.pack(
            self._beats,
            self._step,
            self._since,
            self._step_p99,
            self._checkpoint_p99,
            len(self._steps),
            self._phase.encode()[:32],
            self.stage,
            *astuple(self.own.newest),
        )
        begin = self._beats % 2 * _SLOT_BYTES
        whole = beat + _CHECKSUM.pack(zlib.crc32(beat))
        self._memory[begin : begin + len(whole)] = whole


def read(file: Path) -> Reading | None:
    """Return the newest whole beat; None where there is none (yet)."""
    for _ in range(_READ_TRIES):  # both slots may be written to during one reading
        try:
            data = file.read_bytes()
        except OSError:
            return None
        beats = [beat for begin in (0, _SLOT_BYTES) if (beat := _whole(data[begin : begin + _SLOT_BYTES]))]
        if beats:
            _, step, since, step_p99, checkpoint_p99, measured, phase, stage, *own = max(beats)
            name = phase.rstrip(b"\0").decode(errors="replace")
            return Reading(name, step, since, step_p99, checkpoint_p99, measured, stage, OwnTime(*own))
    return None


def _whole(slot: bytes) -> tuple[Any, ...] | None:
    if len(slot) < _BEAT.size + _CHECKSUM.size:
        return None
    beat = slot[: _BEAT.size]
    [checksum] = _CHECKSUM.unpack_from(slot, _BEAT.size)
    # All zeros, which a fresh file holds, have the checksum of something else.
    return _BEAT.unpack(beat) if zlib.crc32(beat) == checksum else None


def _p99(values: deque[float]) -> float:
    return sorted(values)[(len(values) * 99) // 100] if values else 0.0
