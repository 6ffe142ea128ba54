"""When a checkpoint is made, in which tiers, and which one a restart goes on from."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from llmtrain_trainer.checkpoint import state as states
from llmtrain_trainer.checkpoint.base import Resume
from llmtrain_trainer.checkpoint.header import spec_fingerprint
from llmtrain_trainer.checkpoint.local import LocalTier
from llmtrain_trainer.checkpoint.manifest import Manifest
from llmtrain_trainer.checkpoint.outcome import Committed, Failed, Position
from llmtrain_trainer.checkpoint.pace import Meter, Pace, failure_seconds, young_interval
from llmtrain_trainer.checkpoint.places import local_tiers_of, store_of
from llmtrain_trainer.checkpoint.shared import SharedTier
from llmtrain_trainer.checkpoint.state import TrainingState
from llmtrain_trainer.checkpoint.writer import Writer, from_all
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.distributed import Ranks
from llmtrain_trainer.errors import CheckpointError

log = logging.getLogger(__name__)

LAST_PAUSES = (1.0, 3.0, 9.0)
"""Seconds before the last checkpoint is tried again: with the tries, well within deadlines.stopSeconds' default."""


class CheckpointManager:
    """One rank's checkpoints. Every rank calls the same methods at the same steps.

    A tier that cannot be written costs nothing but that checkpoint, since training goes on and the next one is tried;
    only at the end, when all must be in the store, is it an error. A rank that is gone is another matter: that ends the
    attempt, as everywhere.
    """

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        checkpoint = config.spec.checkpoint
        self._config = config
        self._ranks = ranks
        self._store = store_of(config)
        self._locals = local_tiers_of(config)
        self._shared_tier = SharedTier(config, self._store)
        self._shared = Writer(self._shared_tier)
        self._writers = [Writer(tier) for tier in self._locals]
        self._meter = Meter()
        by_time = checkpoint.every_seconds is not None or checkpoint.pace == "auto"
        self._pace = Pace(self._meter, self._interval_seconds) if by_time else None
        self._owned_at = time.time()
        self._resumed_in: LocalTier | None = None
        self.committed: Committed | None = None
        """The newest checkpoint in the store that counts, as far as this rank knows."""
        self.on_failure: Callable[[Failed], None] = lambda _: None
        """Called in the training thread with each checkpoint that was not made."""

    @property
    def metrics_folder(self) -> Path:
        return self._store.metrics_folder

    @property
    def data_fingerprint(self) -> str:
        """Of the data that is read now; every checkpoint holds it."""
        return self._shared_tier.data_fingerprint

    @data_fingerprint.setter
    def data_fingerprint(self, value: str) -> None:
        self._shared_tier.data_fingerprint = value
        for tier in self._locals:
            tier.data_fingerprint = value

    def open(self) -> Resume:
        """Claim the store and choose what to go on from: rank 0 verifies, all ranks hear its choice.

        A step of a tier of the workers' own is chosen where every rank finds its part, and the store has none newer.

        Raises:
            UserError: the store cannot be used, is not shared, or belongs to another run.
            CheckpointError: it cannot be reached.
            StaleAttempt: a newer attempt has claimed the store.
            PeerLostError: rank 0 is gone.
        """
        if self._config.is_first:
            owner = self._store.claim()
            self._ranks.tell("owner", owner)
            self._ranks.tell("claim", str(self._enter()))
        else:
            owner = self._ranks.hear("owner")
            self._store.expect(owner)
            self._store.follow(int(self._ranks.hear("claim")))
        self._owned_at = float(json.loads(owner).get("createdAt", self._owned_at))
        nearest, lacking = self._nearest(str(json.loads(owner).get("id", "")))
        resume = self._choose(nearest)
        if nearest and (resume.manifest is None or resume.manifest.step < nearest.step):
            # The store was not read below this step: what it holds is reported with its next checkpoint.
            resume = Resume(nearest, resume.skipped)
        else:
            self._resumed_in = None
            if resume.manifest:
                self.committed = Committed(resume.manifest.step, resume.manifest.created_at)
                self._shared_tier.newest_good = resume.manifest.step
        step = resume.manifest.step if resume.manifest else -1
        return Resume(resume.manifest, (*resume.skipped, *(text for at, text in lacking if at > step)))

    def _enter(self) -> int:
        try:
            return self._store.enter()
        except OSError as error:
            raise CheckpointError(f"{self._config.spec.checkpoint.store} cannot be claimed: {error}") from error

    def _choose(self, nearest: Manifest | None) -> Resume:
        """Return the newest good checkpoint in the store above that of the workers' own; rank 0's word on all ranks."""
        if not self._config.is_first:
            told = json.loads(self._ranks.hear("resume"))
            manifest = Manifest.model_validate(told["manifest"]) if told["manifest"] else None
            return Resume(manifest, tuple(told["skipped"]))
        try:
            unfinished = [f"{name}: half-written, never committed" for name in self._store.unfinished()]
            found = self._store.newest_good(above=nearest.step if nearest else -1)
            self._store.clear_unfinished()
        except OSError as error:  # no reason to begin anew: the checkpoints may be good
            raise CheckpointError(f"{self._config.spec.checkpoint.store} cannot be read: {error}") from error
        resume = Resume(found.manifest, (*found.skipped, *unfinished))
        told = {"manifest": resume.manifest and resume.manifest.to_wire(), "skipped": resume.skipped}
        self._ranks.tell("resume", json.dumps(told))
        return resume

    def _nearest(self, store_id: str) -> tuple[Manifest | None, list[tuple[int, str]]]:
        """Return the newest checkpoint of the workers' own that every rank has, and which newer ones some lack."""
        best: Manifest | None = None
        lacking: list[tuple[int, str]] = []
        for tier, writer in zip(self._locals, self._writers, strict=True):
            own = tier.open(store_id)
            every: list[dict[int, str]] = from_all({step: found.id for step, found in own.items()}, writer.group)
            agreed = [step for step in own if all(own[step].id == held.get(step) for held in every)]
            # The last step's counts in the store alone: nobody would come to bring it there.
            agreed = sorted(step for step in agreed if step < self._config.spec.training.steps)
            newest = agreed[-1] if agreed else -1
            for step in sorted({step for held in every for step in held if step > newest}):
                without = [str(rank) for rank, held in enumerate(every) if step not in held]
                text = f"not good on rank(s) {', '.join(without[:8])}" if without else "not the same on all ranks"
                lacking.append((step, f"{tier.name} step {step}: {text}"))
            tier.settle(newest, agreed)
            if agreed and (best is None or newest > best.step):
                best, self._resumed_in = own[newest], tier
        return best, lacking

    def restore(self, manifest: Manifest, state: TrainingState) -> Position:
        """Load a verified checkpoint into the live state.

        Raises:
            UserError: it was made by another optimizer.
            CheckpointError: it cannot be loaded.
        """
        states.check_optimizer(manifest, state.optimizer.name)
        launch = self._config.launch
        if manifest.spec_fingerprint != spec_fingerprint(self._config):
            log.warning("the spec has changed since the checkpoint of step %d was made", manifest.step)
        if manifest.data_fingerprint != self.data_fingerprint:
            log.warning("the data has changed since the checkpoint of step %d: its order starts anew", manifest.step)
        shape = self._config.shape
        then = manifest.world_size, manifest.tensor, manifest.context, manifest.pipeline, manifest.expert
        now = shape.world_size, shape.tp, shape.cp, shape.pp, shape.ep

        def fill(tensors: dict[str, Tensor]) -> None:
            if self._resumed_in:
                self._resumed_in.restore(manifest.step, tensors)
            else:
                self._store.read(manifest, tensors)

        states.restore(fill, manifest, state, rank=launch.global_rank, same_layout=then == now)
        return Position(manifest.step, manifest.samples, manifest.loss)

    def save_due(self, position: Position, state: TrainingState) -> None:
        """Copy the state, and write it in the background to each tier in which a checkpoint is due after this step.

        Waits first, for each of those tiers alone, for one that is still being written there. Every rank calls it each
        step.

        Raises:
            RuntimeError: another rank is gone.
        """
        step = position.step
        ends = step >= self._config.spec.training.steps
        due = [w for t, w in zip(self._locals, self._writers, strict=True) if step % t.every_steps == 0 and not ends]
        shared = self._due(step)
        snapshot: dict[str, Any] = {}
        for writer in due:
            self._note(writer.wait())
        if due:
            snapshot = states.snapshot(state, self._config.launch.global_rank)
            for writer in due:
                writer.start(position, snapshot)
        if shared:
            with self._meter.saving():
                self.wait()
                snapshot = snapshot or states.snapshot(state, self._config.launch.global_rank)
                self._shared.start(position, snapshot)

    def _due(self, step: int) -> bool:
        """Tell whether one is due in the store after this step: alike on every rank, each of which asks each step.

        Raises:
            RuntimeError: another rank is gone.
        """
        checkpoint = self._config.spec.checkpoint
        regular = self._pace.due(step) if self._pace else step % checkpoint.every_steps == 0
        return regular or (checkpoint.keep_every_steps is not None and step % checkpoint.keep_every_steps == 0)

    def _interval_seconds(self) -> float:
        """Return the seconds that should lie between checkpoints, on rank 0."""
        checkpoint, launch = self._config.spec.checkpoint, self._config.launch
        if checkpoint.every_seconds is not None:
            return float(checkpoint.every_seconds)
        cost = self._meter.cost_seconds
        if cost is None:
            return math.inf if self._shared.busy else 0.0  # the first one tells what one costs
        lived = time.time() - self._owned_at
        return young_interval(cost, failure_seconds(launch.world_size, launch.attempt - 1, lived))

    def save_last(self, position: Position, state: TrainingState) -> None:
        """Return when the checkpoint of `position` is in the store: nobody comes after it who could save the work.

        Raises:
            CheckpointError: it could not be made, at several tries.
        """
        self.wait()
        if self._counts(position):
            return
        snapshot = states.snapshot(state, self._config.launch.global_rank)
        for pause in (0.0, *LAST_PAUSES):
            time.sleep(pause)
            self._shared.start(position, snapshot)
            failed = self.wait()
            if self._counts(position):
                return
        raise CheckpointError(f"{failed.reason if failed else 'not committed'}; tried {1 + len(LAST_PAUSES)} times")

    def poll(self) -> None:
        """Take note of the end of a step, and of saves that have finished since the last call."""
        self._meter.tick(saving=self._shared.busy)
        if self._shared.done:
            self.wait()
        for writer in self._writers:
            if writer.done:
                self._note(writer.wait())

    def wait(self) -> Failed | None:
        """Return when nothing is being written to the store any more: the failure, where it was not made."""
        outcome = self._shared.wait()
        if outcome is not None:
            self._meter.saved(good=isinstance(outcome, Committed))
        if isinstance(outcome, Committed):
            self.committed = outcome
        return self._note(outcome)

    def finish(self, *, complete: bool) -> None:
        """Return when nothing is being written to any tier. A run that is complete in the store needs no other one."""
        for tier, writer in zip(self._locals, self._writers, strict=True):
            self._note(writer.wait())
            if complete:
                tier.clear()

    def _note(self, outcome: Committed | Failed | None) -> Failed | None:
        if not isinstance(outcome, Failed):
            return None
        self.on_failure(outcome)
        return outcome

    def _counts(self, position: Position) -> bool:
        return self.committed is not None and self.committed.step == position.step
