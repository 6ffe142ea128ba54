"""Stages 0 and 1 of ZeRO without FSDP2: parameters lie whole on every data rank, and share few, large messages.

FSDP2 gathers and frees what nobody wants freed here, at a price in Python per module that a small model notices. So the
model's forward and backward stay as on one device. Gradients are packed into buckets, each of which is summed over data
ranks as soon as backward has all of it, while backward goes on. In stage 1 a rank gets the sum of its own rows alone,
moves the fp32 master copy of those with its part of the optimizer's state, and all gather the outcome in the compute
type. In stage 0 every rank gets the whole sum, and does the whole of the optimizer's work.

Sources: Rajbhandari et al. 2019 (ZeRO, arXiv:1910.02054), Li et al. 2020 (buckets that overlap with backward,
arXiv:2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmtrain_trainer.model.transformer import Transformer
from llmtrain_trainer.parallel.apply import COMPUTE_TYPE, Sharing, materialise, named_parameters
from llmtrain_trainer.parallel.bucket import Bucket, Groups, Slot, fill_buckets
from llmtrain_trainer.parallel.pieces import Box


class Flat:
    """Parameters that every data rank holds whole; see apply.Weights."""

    def __init__(self, stages: Mapping[int, Transformer], sharing: Sharing) -> None:
        compute = COMPUTE_TYPE[sharing.precision]
        for stage in stages.values():
            for parameter in stage.parameters():  # not the buffers: what routers remember stays fp32
                parameter.data = parameter.data.to(compute)
            materialise(stage, sharing.device)
        self._parameters = named_parameters(stages.values())
        self._buckets = _buckets(self._parameters, sharing)
        slots = {slot.name: (bucket, slot) for bucket in self._buckets for slot in bucket.slots}
        self._slots = {name: slots[name] for name in self._parameters}
        self.shards: Mapping[str, Tensor] = {
            name: slot.own(bucket.masters) for name, (bucket, slot) in self._slots.items()
        }
        self.boxes: Mapping[str, Box] = {name: slot.box for name, (_, slot) in self._slots.items()}
        self._due = False
        self._next = 0
        """The first bucket whose reduction has not begun. They begin in this order, on all ranks alike."""
        self._summed_in_fp32 = sharing.pipelined or sharing.micro_batches > 1
        if self._summed_in_fp32:
            for parameter in self._parameters.values():
                parameter.grad_dtype = torch.float32
        if not sharing.pipelined and any(bucket.groups.busy for bucket in self._buckets):
            self._watch()

    def before_backward(self, *, sync: bool, last: bool) -> None:
        """Say whether the next backward's gradients, and those kept since the last reduction, are to be reduced."""
        self._due = sync

    def after_backward(self) -> None:
        """Begin what backward could not: the reduction of a bucket of which some parameter had no gradient."""
        if not self._due:
            return
        while self._next < len(self._buckets):
            self._begin_next()
        self._due, self._next = False, 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)

    def before_pipeline(self) -> None:
        """Reduce once, when the schedule is through: some put gradients together without telling anybody."""
        self._due = True
        for parameter in self._parameters.values():
            if parameter.dtype != torch.float32:  # they add to what is there, and would put bf16 where nothing is
                parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the shards. What no rank's loss depends on has one of zeros."""
        for bucket in self._buckets:
            bucket.settle()
        for wait in [bucket.sum_copies() for bucket in self._buckets]:
            wait()
        return {name: slot.own(bucket.gradient) for name, (bucket, slot) in self._slots.items()}

    def forget_gradients(self) -> None:
        """Let go of the sums; the parameters' own went with the reduction."""
        for bucket in self._buckets:
            bucket.forget()

    @torch.no_grad()
    def shards_have_changed(self) -> None:
        """Cast and gather the shards into the parameters, while the next bucket is on its way."""
        self.forget_gradients()
        arriving: Callable[[], None] | None = None
        for bucket in self._buckets:
            after, arriving = arriving, bucket.publish()
            if after is not None:
                after()
        if arriving is not None:
            arriving()

    def _watch(self) -> None:
        for bucket in self._buckets:
            arrived = partial(self._arrived, bucket)
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, bucket: Bucket, _: Tensor) -> None:
        """Take note of a gradient, and begin the reductions that it was the last thing missing for."""
        if not self._due:
            return
        bucket.missing -= 1
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._begin_next()

    def _begin_next(self) -> None:
        self._buckets[self._next].reduce()
        self._next += 1


def _buckets(parameters: Mapping[str, nn.Parameter], sharing: Sharing) -> list[Bucket]:
    """Return buckets in the order in which backward completes them: of the last parameters first."""
    meshes, sharded = sharing.meshes, sharing.zero_stage == 1
    groups = _groups(meshes.data, sharded=sharded)
    of_experts = _groups(meshes.experts, sharded=sharded) if meshes.experts else groups

    def group(name: str) -> Groups:
        return of_experts if ".experts." in name else groups

    slots: Iterable[tuple[Groups, Slot]] = (
        (group(name), Slot.of(name, parameter, group(name))) for name, parameter in reversed(list(parameters.items()))
    )
    return fill_buckets(slots)


def _groups(mesh: DeviceMesh, *, sharded: bool) -> Groups:
    """Return which ranks share a bucket's rows, and which have the same ones."""
    copies = mesh.size(0) if mesh.ndim == 2 else 1
    if sharded:
        return Groups(_group(mesh, mesh.ndim - 1), _group(mesh, 0) if mesh.ndim == 2 else None, copies)
    whole = mesh._flatten("_".join(mesh.mesh_dim_names or ()) + "_whole") if mesh.ndim == 2 else mesh
    return Groups(None, _group(whole, 0), mesh.size())


def _group(mesh: DeviceMesh, dim: int) -> dist.ProcessGroup | None:
    return mesh.get_group(dim) if mesh.size(dim) > 1 else None
