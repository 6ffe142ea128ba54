"""The device mesh. Its axes, outermost first: pp, dp_replicate, dp_shard, cp, tp.

Experts see the same ranks by a second division, in which edp x ep stand where dp_shard x cp stood: ep of these ranks
hold different experts, and edp of them share each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from pydantic.alias_generators import to_camel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.errors import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelShape:
    """How many ranks lie along each axis. Their product is the world size."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Not an axis of its own: these ranks are among those of dp_shard and cp."""

    @classmethod
    def of(
        cls,
        world_size: int,
        *,
        replicate: int = 1,
        tensor: int = 1,
        context: int = 1,
        pipeline: int = 1,
        expert: int = 1,
    ) -> ParallelShape:
        """Return the shape in which what is left over is sharded. This is the one place that says what is legal.

        Raises:
            UserError: the ranks cannot be laid out so.
        """
        left = world_size
        asked = (("tensor", tensor), ("context", context), ("pipeline", pipeline), ("replicate", replicate))
        for field, degree in asked:
            if left % degree:
                divisors = [n for n in range(1, left + 1) if left % n == 0]
                raise UserError(
                    f"parallelism.{field}",
                    degree,
                    f"{left} of {world_size} ranks are left for this axis, and {degree} does not divide them",
                    allowed=f"a divisor of {left}: {', '.join(map(str, divisors))}",
                    fix="choose one of them, or change workers.replicas or workers.ranksPerWorker",
                )
            left //= degree
        if left * context % expert:
            raise UserError(
                "parallelism.expert",
                expert,
                f"{left * context} ranks share one copy of the model and its context; {expert} does not divide them",
                allowed=f"a divisor of {left * context}",
                fix="choose one, or change the other axes or the number of ranks",
            )
        return cls(pp=pipeline, dp_replicate=replicate, dp_shard=left, cp=context, tp=tensor, ep=expert)

    def check(self, dims: ModelDimensions) -> None:
        """Refuse a model that cannot be cut so.

        Raises:
            UserError: naming the first dimension that an axis does not divide, and the degrees that are legal.
        """
        if dims.sequence_length % (self.tp * self.cp) and not dims.sequence_length % self.tp:
            per_rank = dims.sequence_length // self.tp
            raise UserError(
                "parallelism.context",
                self.cp,
                f"model.sequenceLength is {dims.sequence_length}: no multiple of tensor {self.tp} x context {self.cp}",
                allowed=f"a divisor of {per_rank}",
                fix="choose one, or change model.sequenceLength",
            )
        cut = ("heads", "kv_heads", "ffn_dim", "vocab_size", "sequence_length")
        for dimension in cut:
            value = getattr(dims, dimension)
            if value % self.tp:
                legal = math.gcd(*(getattr(dims, name) for name in cut))
                degrees = [n for n in range(1, legal + 1) if legal % n == 0]
                raise UserError(
                    "parallelism.tensor",
                    self.tp,
                    f"model.{to_camel(dimension)} is {value}, which {self.tp} does not divide",
                    allowed=f"for this model: {', '.join(map(str, degrees))}",
                    fix="choose one of them, or change the model",
                )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    def data_index(self, rank: int) -> int:
        """Return which of the data ranks `rank` is."""
        return rank // (self.cp * self.tp) % self.data_ranks

    def pipeline_index(self, rank: int) -> int:
        """Return the place of `rank` in its pipeline, from 0."""
        return rank // (self.data_ranks * self.cp * self.tp)

    def active_axes(self) -> dict[str, int]:
        """Return the axes that the mesh has: those wider than one, and dp_shard always, because FSDP needs it."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1 or axis == "dp_shard"}

    def build(self, device_type: str) -> DeviceMesh:
        """Open the mesh and its process groups; a collective call. Axes of one rank are left out: they cost groups."""
        axes = self.active_axes()
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def expert_mesh(shape: ParallelShape, device_type: str) -> DeviceMesh | None:
    """Open the mesh by which experts see the ranks; None where every rank holds a part of every expert.

    A collective call, as `build`.
    """
    if shape.ep == 1:
        return None
    edp = shape.dp_shard * shape.cp // shape.ep
    axes = {"pp": shape.pp, "dp_replicate": shape.dp_replicate, "edp": edp, "ep": shape.ep, "tp": shape.tp}
    active = {name: degree for name, degree in axes.items() if degree > 1 or name == "edp"}
    return init_device_mesh(device_type, tuple(active.values()), mesh_dim_names=tuple(active))


def expert_data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of an expert mesh over which FSDP works: [dp_replicate, edp] (HSDP) or [edp]."""
    return mesh["dp_replicate", "edp"] if "dp_replicate" in (mesh.mesh_dim_names or ()) else mesh["edp"]


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part over which FSDP works: [dp_replicate, shard] (HSDP) or [shard], shard being dp_shard and cp."""
    names = mesh.mesh_dim_names or ()
    shard = mesh["dp_shard", "cp"]._flatten("dp_shard_cp") if "cp" in names else mesh["dp_shard"]
    if "dp_replicate" not in names:
        return shard
    return mesh["dp_replicate", "dp_shard_cp" if "cp" in names else "dp_shard"]


def copy_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Open the group of ranks that together hold one copy of a stage; None where one rank does. A collective call."""
    axes = [axis for axis in ("dp_shard", "cp", "tp") if axis in (mesh.mesh_dim_names or ())]
    whole = mesh[tuple(axes)]._flatten("_".join(axes) + "_copy") if len(axes) > 1 else mesh[axes[0]]
    return whole.get_group() if whole.size() > 1 else None


def group_of(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup | None:
    """Return this rank's group along an axis; None where the axis has one rank."""
    return mesh.get_group(axis) if axis in (mesh.mesh_dim_names or ()) else None
