"""The model as one rank holds it: some stages, cut and sharded, that together make the gradients of a step.

The order in which a stage is treated is part of what it is: tensor parallel and expert parallel (new shapes), context
parallel, compilation and recomputation (each wraps a layer's forward), sharing over data ranks (FSDP2's hooks must run
once, outside of all that).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from llmtrain_api.spec import STAGES_PER_RANK
from llmtrain_api.stages import layers_of_stages, stages_of_rank
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.metrics.timer import StepTimer
from llmtrain_trainer.model.documents import document_mask
from llmtrain_trainer.model.transformer import Transformer, loss_sum, rotary_tables
from llmtrain_trainer.parallel import apply
from llmtrain_trainer.parallel.compile import compile_layers
from llmtrain_trainer.parallel.context import own_part, own_positions, spread_context
from llmtrain_trainer.parallel.expert import spread_experts
from llmtrain_trainer.parallel.flat import Flat
from llmtrain_trainer.parallel.fsdp import FullySharded
from llmtrain_trainer.parallel.mesh import copy_group, data_mesh, expert_data_mesh, expert_mesh, group_of
from llmtrain_trainer.parallel.pieces import Cuts, join_cuts, pieces_of
from llmtrain_trainer.parallel.pipeline import Passed, Pipeline
from llmtrain_trainer.parallel.recompute import recompute
from llmtrain_trainer.parallel.routing import Routing
from llmtrain_trainer.parallel.tensor import cut_model, sum_replicated
from llmtrain_trainer.parallel.vocabulary import vocabulary_loss_sum

Batches = Iterable[tuple[Tensor, Tensor]]
"""Micro-batches of inputs and targets, int64 [B, L] each."""


class RankModel:
    """What this rank has of the model. Building it opens process groups: all ranks do so together."""

    def __init__(self, config: RunConfig, document_end: int | None = None) -> None:
        """Args: document_end: the token that ends a document, if attention is to stay within documents."""
        self._config = config
        self._document_end = document_end
        self._parallelism = config.spec.parallelism
        # A dry run builds without memory, on the meta device, where nothing could talk.
        talks = "cpu" if config.device.type == "meta" else config.device.type
        mesh = config.shape.build(talks)
        self._tensor, self._context = group_of(mesh, "tp"), group_of(mesh, "cp")
        self.copy_group = copy_group(mesh) if config.spec.training.optimizer.name == "muon" else None
        experts = expert_mesh(config.shape, talks)
        self._expert = group_of(experts, "ep") if experts else None
        with torch.device("meta"):
            self.stages = {number: self._stage(number) for number in self._own_stages()}
            self._cuts: Cuts = {}
            for stage in self.stages.values():
                self._cuts = join_cuts(self._cuts, self._treat(stage))
        meshes = apply.Meshes(data_mesh(mesh), expert_data_mesh(experts) if experts else None)
        pipeline = group_of(mesh, "pp")
        self._weights = self._share(meshes, pipelined=pipeline is not None)
        self.shards = self._weights.shards
        self.pieces = pieces_of(self._weights.boxes, self._cuts, config.shape.tp)
        self.routing = Routing(self.stages.values(), config)
        cosine, sine = rotary_tables(config.dimensions, config.device)
        self._rotary = self._own(cosine, dim=0), self._own(sine, dim=0)
        self._pipeline = (
            Pipeline(self.stages, self._parallelism.pipeline_schedule, pipeline, self._passed()) if pipeline else None
        )

    def initialise(self) -> None:
        """Give every shard its first values."""
        dims = self._config.dimensions
        apply.initialise(self.shards, self.pieces, layers=dims.layers, seed=self._config.spec.training.seed)

    def forward_backward(self, batches: Batches, timer: StepTimer, scale: float = 1.0) -> Tensor:
        """Accumulate the gradient of the mean loss over the global batch, times `scale`.

        Returns:
            This rank's share of that mean, times `scale`.
        """
        self._scale = scale
        self.routing.scale_losses(scale)
        if self._pipeline is None:
            return self._accumulate(batches, timer)
        parts = [
            (self._to_device(inputs), self._to_device(targets), self._beside(inputs)) for inputs, targets in batches
        ]
        timer.mark("data_loading")
        timer.enter("pipeline")
        inputs, targets, beside = zip(*parts, strict=True)
        self._weights.before_pipeline()
        loss = self._pipeline.forward_backward(inputs, targets, beside, self._loss)
        self._weights.after_backward()
        timer.mark("pipeline")
        return torch.zeros((), device=self._config.device) if loss is None else loss

    def gradients(self) -> dict[str, Tensor]:
        """Return the step's gradients of the shards, fp32: of the whole global batch, on every rank that has them."""
        gradients = self._weights.gradients()
        if self._tensor:
            sum_replicated(gradients, self._cuts, self._tensor)
        return gradients

    def forget_gradients(self) -> None:
        """Let go of the step's gradients: it moves no weights."""
        self._weights.forget_gradients()

    def shards_have_changed(self) -> None:
        """Let the model compute with what is now in the shards: first values, a checkpoint, or an optimizer's step.

        A collective call: all ranks make it together. Gradients are forgotten.
        """
        self._weights.shards_have_changed()

    def _accumulate(self, batches: Batches, timer: StepTimer) -> Tensor:
        """Gradients are reduced with the last micro-batch, and every training.syncEveryMicroBatches before it."""
        [stage] = self.stages.values()
        count = self._config.micro_batches_per_step
        period = self._config.spec.training.sync_every_micro_batches or count
        total = torch.zeros((), device=self._config.device)
        for number, (inputs, targets) in enumerate(batches, 1):
            last = number == count
            sync = last or number % period == 0
            self._weights.before_backward(sync=sync, last=last)
            beside = self._beside(inputs)
            inputs, targets = self._to_device(inputs), self._to_device(targets)
            timer.mark("data_loading")
            loss = self._loss(stage(inputs, **beside), targets)
            timer.mark("forward")
            loss.backward()
            self._weights.after_backward()
            total += loss.detach()
            timer.mark("backward")
        return total

    def _share(self, meshes: apply.Meshes, *, pipelined: bool) -> apply.Weights:
        """Share the stages' parameters over data ranks, and give them memory."""
        stage = self._parallelism.zero_stage
        sharing = apply.Sharing(
            meshes=meshes,
            precision=self._config.spec.training.precision,
            zero_stage=stage,
            device=self._config.device,
            micro_batches=self._config.micro_batches_per_step,
            pipelined=pipelined,
        )
        return FullySharded(self.stages, sharing) if stage >= 2 else Flat(self.stages, sharing)

    def _own_stages(self) -> list[int]:
        """Return the numbers of this rank's stages; without a pipeline the model is one stage."""
        ranks = self._config.shape.pp
        if ranks == 1:
            return [0]
        rank = self._config.shape.pipeline_index(self._config.launch.global_rank)
        return stages_of_rank(self._parallelism.pipeline_schedule, rank, ranks)

    def _stage(self, number: int) -> Transformer:
        ranks, stage = self._config.shape.pp, Transformer(self._config.dimensions)
        if ranks > 1:
            count = ranks * STAGES_PER_RANK[self._parallelism.pipeline_schedule]
            layers = layers_of_stages(self._config.dimensions, count)
            stage.keep(layers[number], first=number == 0, last=number == count - 1)
        return stage

    def _treat(self, stage: Transformer) -> Cuts:
        cuts: Cuts = {}
        if self._tensor:
            cuts = join_cuts(cuts, cut_model(stage, self._tensor))
        if self._expert:
            cuts = join_cuts(cuts, spread_experts(stage, self._expert))
        if self._context:
            spread_context(stage, self._context)
        if self._config.spec.training.compile:
            compile_layers(stage)
        recompute(stage, self._parallelism.recompute)
        return cuts

    def _passed(self) -> Passed:
        dims, shape, training = self._config.dimensions, self._config.shape, self._config.spec.training
        B, L = training.micro_batch_size, dims.sequence_length // shape.cp
        return Passed(
            tokens=(B, L),
            residual=(B, L // shape.tp, dims.dim),
            logits=(B, L, dims.vocab_size // shape.tp),
            dtype=apply.COMPUTE_TYPE[training.precision],
            device=self._config.device,
        )

    def _beside(self, inputs_BS: Tensor) -> dict[str, Any]:
        """Return what a stage needs to know of whole sequences, besides its part of them."""
        if self._document_end is None:
            return {"rotary": self._rotary}
        length = inputs_BS.shape[1]
        queries = own_positions(length, self._context) if self._context else range(length)
        tokens_BS = inputs_BS.to(self._config.device, non_blocking=True)
        dtype = apply.COMPUTE_TYPE[self._config.spec.training.precision]
        return {"rotary": self._rotary, "mask_BLS": document_mask(tokens_BS, self._document_end, queries, dtype)}

    def _to_device(self, whole: Tensor) -> Tensor:
        return self._own(whole, dim=1).to(self._config.device, non_blocking=True)

    def _own(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of the sequence, which lies along `dim`."""
        return own_part(whole, self._context, dim) if self._context else whole

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the micro-batch's share of the mean loss over the global batch, scaled."""
        total = vocabulary_loss_sum(logits, targets, self._tensor) if self._tensor else loss_sum(logits, targets)
        return total / self._config.tokens_per_step * self._scale
