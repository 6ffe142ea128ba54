"""Pipeline parallel: ranks hold consecutive stages, and micro-batches flow through them (torch's schedules).

The loss arrives already divided by the tokens of the global batch, so torch's own scaling of gradients stays off: it
would divide by the number of micro-batches, after the reduction (pytorch/torchtitan issue 2972 is what comes of that).
Shapes of what stages pass on are given, not inferred: inferring runs the model once more, collectives included.

Sources: Huang et al. 2019 (GPipe), Narayanan et al. 2021 (1F1B, interleaved), Qi et al. 2024 (ZBV,
arXiv:2401.10241), DeepSeek-AI 2024 (DualPipe, arXiv:2412.19437; the V form is theirs too).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from llmtrain_api.spec import STAGES_PER_RANK, PipelineSchedule
from llmtrain_trainer.model.transformer import Transformer

SCHEDULES: dict[PipelineSchedule, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZBV": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}

Loss = Callable[[Tensor, Tensor], Tensor]
"""(logits, targets) -> this micro-batch's share of the step's loss."""


@dataclass(frozen=True)
class Passed:
    """What goes through the pipeline for one micro-batch, on this rank."""

    tokens: tuple[int, int]
    """[B, L]: what the first stage reads."""
    residual: tuple[int, int, int]
    """[B, L, D]: what stages pass on; a part of the sequence under tensor parallel."""
    logits: tuple[int, int, int]
    """[B, L, V]: what the last stage gives; a part of the vocabulary under tensor parallel."""
    dtype: torch.dtype
    device: torch.device


class Pipeline:
    """This rank's stages and the order in which they work."""

    def __init__(
        self, stages: dict[int, Transformer], schedule: PipelineSchedule, group: dist.ProcessGroup, passed: Passed
    ) -> None:
        self._count = group.size() * STAGES_PER_RANK[schedule]
        self._schedule_type = SCHEDULES[schedule]
        self._single = STAGES_PER_RANK[schedule] == 1
        self._stages = [self._stage(number, stage, group, passed) for number, stage in stages.items()]
        self._schedules: dict[int, Any] = {}
        self.first = 0 in stages
        self.last = self._count - 1 in stages

    def forward_backward(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], beside: Sequence[dict[str, Any]], loss: Loss
    ) -> Tensor | None:
        """Run the micro-batches of one step through the pipeline, and reduce their gradients over data ranks.

        `beside` holds what every stage's forward gets of a micro-batch besides the tokens.

        Returns:
            The sum of the losses on the rank that holds the last stage; None elsewhere.
        """
        losses: list[Tensor] | None = [] if self.last else None
        schedule = self._schedule(len(inputs), loss)
        schedule.step(
            arg_mbs=[(tokens,) if self.first else () for tokens in inputs],
            kwarg_mbs=list(beside),
            target_mbs=list(targets) if self.last else None,
            losses=losses,
            return_outputs=False,
        )
        return torch.stack([one.detach() for one in losses]).sum() if losses else None

    def _stage(self, number: int, stage: Transformer, group: dist.ProcessGroup, passed: Passed) -> PipelineStage:
        # On the meta device: shapes and types are read, and which of them want gradients passed back.
        read = torch.empty(passed.tokens, dtype=torch.int64, device="meta")
        between = torch.empty(passed.residual, dtype=passed.dtype, device="meta", requires_grad=True)
        given = torch.empty(passed.logits, dtype=passed.dtype, device="meta", requires_grad=True)
        return PipelineStage(
            stage,
            number,
            self._count,
            passed.device,
            input_args=read if number == 0 else between,
            output_args=given if number == self._count - 1 else between,
            group=group,
        )

    def _schedule(self, micro_batches: int, loss: Loss) -> Any:
        """Return the schedule for so many micro-batches; stages can be used by several."""
        if micro_batches not in self._schedules:
            stages = self._stages[0] if self._single else self._stages
            self._schedules[micro_batches] = self._schedule_type(
                stages, n_microbatches=micro_batches, loss_fn=loss, scale_grads=False
            )
        return self._schedules[micro_batches]
