"""The training loop: load, step, save and report."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from llmtrain_api.constants import ExitCode
from llmtrain_api.sync_beat import FINISH
from llmtrain_trainer.checkpoint.huggingface.load import open_first_weights
from llmtrain_trainer.checkpoint.manager import CheckpointManager
from llmtrain_trainer.checkpoint.manifest import Manifest
from llmtrain_trainer.checkpoint.outcome import Position
from llmtrain_trainer.checkpoint.state import TrainingState, check_model
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.data.loader import BatchPlan, open_data
from llmtrain_trainer.distributed import Ranks
from llmtrain_trainer.errors import NumericsError
from llmtrain_trainer.heartbeat import Heartbeat
from llmtrain_trainer.metrics.device_probe import DeviceProbe
from llmtrain_trainer.metrics.record import StepRecord
from llmtrain_trainer.metrics.report import Reporter
from llmtrain_trainer.metrics.speed import Utilization
from llmtrain_trainer.metrics.timer import StepTimer
from llmtrain_trainer.optim.guard import StepGuard
from llmtrain_trainer.optim.schedule import learning_rate
from llmtrain_trainer.optim.sharded import ShardedOptimizer
from llmtrain_trainer.parallel.apply import COMPUTE_TYPE
from llmtrain_trainer.parallel.build import RankModel
from llmtrain_trainer.parallel.compile import prepare_compiler
from llmtrain_trainer.parallel.pieces import squared_norm
from llmtrain_trainer.stopping import StopRequest


@dataclass(frozen=True)
class Agreement:
    """What all ranks learn from the one reduction at the end of a step's backward pass."""

    loss: float
    """Of the whole global batch, not scaled, as the norm."""
    grad_norm: float
    stop: bool
    choices: torch.Tensor
    """Of all routers, over the whole global batch."""


class StartPhases:
    """How long each phase of starting took, in seconds."""

    def __init__(self, heart: Heartbeat) -> None:
        self.heart = heart
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.heart.enter(name)
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 4)


class Trainer:
    """One rank of a training run, from the agreed starting point to the last step or the order to stop."""

    def __init__(self, config: RunConfig, ranks: Ranks, phases: StartPhases) -> None:
        self.config = config
        self.phases = phases
        self.stop = StopRequest()
        self.timer = StepTimer(config.device, phases.heart)
        self.probe = DeviceProbe(config.device, phases.heart.own)
        self.utilization = Utilization(config)
        self.training = config.spec.training
        self.guard = StepGuard(self.training)
        self.expert_load: float | None = None
        self.shape = config.shape
        self.data_rank = self.shape.data_index(ranks.rank)
        phases.heart.stage = self.shape.pipeline_index(ranks.rank)
        self.plan = BatchPlan(self.training.global_batch_size, self.training.micro_batch_size, self.shape.data_ranks)
        with phases.phase("checkpoint_verify"):
            self.checkpoints = CheckpointManager(config, ranks)
            self.resume = self.checkpoints.open()
        self.reporter = Reporter(config, self.checkpoints.metrics_folder)
        self.checkpoints.on_failure = self.reporter.checkpoint_failed
        with phases.phase("data"):
            self.data = open_data(config, ranks)
            self.checkpoints.data_fingerprint = self.data.fingerprint
        with phases.phase("first_weights"):
            self.first_weights = None if self.resume.manifest else open_first_weights(config, ranks)

    def train(self) -> ExitCode:
        """Train to the last step, or to the step in which SIGTERM was agreed on; both end in a committed checkpoint.

        Raises:
            UserError, NumericsError, CheckpointError, PeerLostError: see errors.py for what they mean.
        """
        position = self._load()
        if position.step >= self.training.steps:
            self.checkpoints.finish(complete=True)
            self.reporter.already_done(position.step, position.loss, self.checkpoints.committed)
            self.reporter.event("finished", step=position.step, already=True)
            return ExitCode.SUCCESS
        self.stop.listen()
        stopped = False
        self.timer.start()
        while position.step < self.training.steps and not stopped:
            position, stopped = self._step(position)
            if not stopped:
                self.checkpoints.save_due(position, self.state)
            self.timer.mark("checkpoint")
        self.timer.enter(FINISH)
        self._save_last(position)
        code = ExitCode.PREEMPTED if position.step < self.training.steps else ExitCode.SUCCESS
        self.checkpoints.finish(complete=code == ExitCode.SUCCESS)
        self.reporter.event("preempted" if code else "finished", step=position.step)
        return code

    def _load(self) -> Position:
        """Build the model in its shape and fill it: from the checkpoint agreed on, first weights, or the seed."""
        manifest = self.resume.manifest
        self.reporter.skipped = self.resume.skipped
        for reason in self.resume.skipped:
            self.reporter.event("checkpoint_skipped", reason=reason)
        if manifest is not None:
            self.reporter.resumed_from = manifest.step
        if manifest is not None:
            check_model(manifest, self.config.dimensions)
        if manifest is not None and manifest.step >= self.training.steps:
            return Position(manifest.step, manifest.samples, manifest.loss)
        with self.phases.phase("model"):
            torch.manual_seed(self.training.seed + self.config.launch.global_rank)
            if self.training.compile:
                prepare_compiler(self.config.device, self.config.work_dir)
            self.model = RankModel(self.config, self.data.document_end)
            options = self.training.optimizer.decided()
            model, dtype = self.model, COMPUTE_TYPE[self.training.precision]
            self.optimizer = ShardedOptimizer(model.shards, model.pieces, options, model.copy_group, dtype)
            self.state = TrainingState(self.optimizer, {**self.model.routing.tensors(), **self.guard.tensors()})
        with self.phases.phase("checkpoint_load" if manifest else "initialise"):
            position = self._restore(manifest) if manifest else self._initialise()
            self.model.shards_have_changed()
        if manifest is not None:
            self.reporter.event("resumed", step=position.step, skipped=list(self.resume.skipped))
        return position

    def _restore(self, manifest: Manifest) -> Position:
        position = self.checkpoints.restore(manifest, self.state)
        self.optimizer.set_steps_done(position.step - self.guard.skipped)
        return position

    def _initialise(self) -> Position:
        if self.first_weights is None:
            self.model.initialise()
            return Position()
        self.first_weights.fill(self.optimizer.shards, self.optimizer.pieces)
        self.first_weights = None  # lets go of the files
        self.reporter.event("initialised", source=self.config.spec.model.init_from)
        return Position()

    def _step(self, position: Position) -> tuple[Position, bool]:
        """Make one optimizer step. Returns where training stands after it, and whether to stop."""
        step = position.step + 1
        self.timer.enter("data_loading", step)
        self.probe.step()
        batches = self.data.loader.step(position.samples, self.plan, self.data_rank)
        loss = self.model.forward_backward(batches, self.timer, self.guard.scaler.scale)
        self.timer.enter("sync_wait")
        gradients = self.model.gradients()
        agreed = self._agree(loss, gradients)
        self.timer.mark("sync_wait")
        rate = learning_rate(step, self.training)
        skipped = self._update(step, agreed, gradients, rate)
        self.timer.mark("optimizer")
        loss_now = agreed.loss if math.isfinite(agreed.loss) else position.loss
        after = Position(step, position.samples + self.training.global_batch_size, loss_now)
        self._report(after, agreed, rate, skipped)
        self.timer.mark("report")
        return after, agreed.stop

    def _update(self, step: int, agreed: Agreement, gradients: dict[str, torch.Tensor], rate: float) -> str:
        """Move the weights, unless the guard has a reason not to; return that reason."""
        scale = self.guard.scaler.scale
        try:
            reason = self.guard.reason_to_skip(step, agreed.loss, agreed.grad_norm)
        except NumericsError:
            self.timer.enter("checkpoint")
            self.checkpoints.wait()  # what is on its way is what the restart will need
            raise
        if reason:
            self.model.forget_gradients()
            return reason
        clip = self.training.optimizer.gradient_clip_norm
        factor = min(1.0, clip / (agreed.grad_norm + 1e-6)) if agreed.grad_norm > clip else 1.0
        if factor / scale != 1.0:
            torch._foreach_mul_(list(gradients.values()), factor / scale)
        self.optimizer.step(gradients, rate)
        self.model.shards_have_changed()
        self.expert_load = self.model.routing.balance(agreed.choices)
        return ""

    def _agree(self, loss: torch.Tensor, gradients: dict[str, torch.Tensor]) -> Agreement:
        """Sum loss, squared gradient norm, wish to stop and routers' choices over all ranks, in one float64 reduction.

        Every rank takes the same decisions from it: bits are equal on all ranks, whatever the backend's order.
        """
        squared = squared_norm(gradients, self.optimizer.pieces)
        stop = torch.tensor(float(self.stop.asked), dtype=torch.float64, device=loss.device)
        own = torch.stack((loss.double() / self.shape.tp, squared, stop))  # the tensor axis holds the same loss
        totals = torch.cat((own, self.model.routing.take_choices()))
        dist.all_reduce(totals)
        loss_total, squared_total, stop_total = totals[:3].tolist()
        norm = math.sqrt(squared_total) if squared_total >= 0 else math.nan
        scale = self.guard.scaler.scale
        return Agreement(loss_total / scale, norm / scale, stop_total > 0, totals[3:])

    def _report(self, after: Position, agreed: Agreement, rate: float, skipped: str) -> None:
        seconds, split = self.timer.finish()
        speed, memory = self.config.tokens_per_step / seconds, self.reporter.memory.read()
        record = StepRecord(
            run_id=self.config.launch.run_id,
            attempt=self.config.launch.attempt,
            step=after.step,
            loss=agreed.loss if math.isfinite(agreed.loss) else None,
            grad_norm=agreed.grad_norm if math.isfinite(agreed.grad_norm) else None,
            learning_rate=rate,
            skipped=skipped,
            skipped_steps=self.guard.skipped,
            loss_scale=self.guard.scaler.scale,
            tokens=after.samples * self.config.dimensions.sequence_length,
            tokens_per_second=speed,
            mfu=self.utilization.of(speed),
            step_seconds=seconds,
            split=split,
            memory_bytes=memory["peak"],
            memory=memory,
            expert_load=self.expert_load,
            time=time.time(),
        )
        self.checkpoints.poll()
        self.reporter.step(record, self.checkpoints.committed)
        if "first_step" not in self.phases.seconds:
            self.phases.seconds["first_step"] = round(seconds, 4)
            self.reporter.event("started", step=after.step, phases=self.phases.seconds)

    def _save_last(self, position: Position) -> None:
        self.checkpoints.save_last(position, self.state)
        self.reporter.tell_agent(self.checkpoints.committed)
