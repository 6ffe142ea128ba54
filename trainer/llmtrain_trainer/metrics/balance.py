"""Whether a step's time goes where it should, and one line of advice where it does not.

Ideal shares are those that projects of this kind aim at: 15 % data_loading, 35 % forward, 45 % backward, 5 % sync_wait.
Loading or waiting less is no fault: forward and backward may take what is saved there. Judged are means over a window
of steps, without the first ones of an attempt, which are slow for reasons of their own.
"""

from __future__ import annotations

from collections import deque

IDEAL = {"data_loading": 0.15, "forward": 0.35, "backward": 0.45, "sync_wait": 0.05}
"""Parts of the time that these four take together."""
TOLERANCE = {"data_loading": 0.05, "forward": 0.10, "backward": 0.10, "sync_wait": 0.05}
BESIDE = {"optimizer": 0.15, "report": 0.05, "checkpoint": 0.05}
"""The most that these should take, as parts of the whole step."""
WARM_UP_STEPS = 3
WINDOW_STEPS = 32
AGAIN_STEPS = 8
"""The part that is most off is named anew at most so often."""

ADVICE = {
    "data_loading": "the model waits for data: put data.sources on faster storage, or give workers more CPU",
    "forward": "kernels are small or attention long: raise training.microBatchSize if memory allows",
    "backward": "layers are computed again: if memory allows, set parallelism.recompute to selective or none",
    "sync_wait": "ranks wait for each other: look for a slow worker or network, raise training.globalBatchSize, or use "
    "fewer ranks per axis of parallelism",
    "optimizer": "steps are short beside the update: raise training.globalBatchSize",
    "report": "telling steps takes long: look at the storage of checkpoint.store, where metrics.jsonl lies",
    "checkpoint": "training waits for checkpoints: set checkpoint.pace to auto, or use faster storage",
}


def shares(split: dict[str, float]) -> dict[str, float]:
    """Return each part's share: of IDEAL's parts among themselves, of the others in the whole step."""
    core = sum(split.get(part, 0.0) for part in (*IDEAL, "pipeline")) or 1.0
    whole = sum(split.values()) or 1.0
    return {part: seconds / (whole if part in BESIDE else core) for part, seconds in split.items()}


def advice(split: dict[str, float]) -> tuple[str, str]:
    """Return the part that is most above its limit, and a line about it; two empty texts where all is well."""
    found = shares(split)
    spare = sum(max(0.0, IDEAL[part] - found.get(part, 0.0)) for part in ("data_loading", "sync_wait"))
    limits = {part: IDEAL[part] + TOLERANCE[part] for part in IDEAL} | BESIDE
    limits["forward"] += spare
    limits["backward"] += spare
    over = {part: found[part] / limit for part, limit in limits.items() if part in found and found[part] > limit}
    if not over:
        return "", ""
    part = max(over, key=lambda name: over[name])
    usual = f"at most {BESIDE[part]:.0%}" if part in BESIDE else f"ideally {IDEAL[part]:.0%}"
    return part, f"{part} takes {found[part]:.0%} of a step, {usual}: {ADVICE[part]}"


class Balance:
    """Watches an attempt's steps."""

    def __init__(self) -> None:
        self._seen = 0
        self._window: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS)
        self._part = ""
        self.advice = ""
        """The newest line of advice; empty where all is well."""

    def step(self, split: dict[str, float]) -> bool:
        """Take note of a step; return whether there is new advice."""
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return False
        self._window.append(split)
        if len(self._window) < AGAIN_STEPS or self._seen % AGAIN_STEPS:
            return False
        mean = {part: sum(one.get(part, 0.0) for one in self._window) for part in self._window[-1]}
        part, self.advice = advice(mean)
        new = part not in ("", self._part)
        self._part = part
        return new
