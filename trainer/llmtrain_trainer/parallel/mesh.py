"""The only device mesh. Its axes, outermost first: pp, dp_replicate, dp_shard, cp, tp."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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

    @classmethod
    def of(cls, world_size: int, *, replicate: int) -> ParallelShape:
        """Return the shape in which what is not replicated is sharded. This is the one place that says what is legal.

        Raises:
            UserError: the ranks cannot be laid out so.
        """
        if world_size % replicate:
            divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise UserError(
                "parallelism.replicate",
                replicate,
                f"{world_size} ranks cannot be split into {replicate} equal copies",
                allowed=f"a divisor of {world_size}: {', '.join(map(str, divisors))}",
                fix="choose one of them, or change workers.replicas or workers.ranksPerWorker",
            )
        return cls(dp_replicate=replicate, dp_shard=world_size // replicate)

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

    def active_axes(self) -> dict[str, int]:
        """Return the axes that the mesh has: those wider than one, and dp_shard always, because FSDP needs it."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1 or axis == "dp_shard"}

    def build(self, device_type: str) -> DeviceMesh:
        """Open the mesh and its process groups; a collective call. Axes of one rank are left out: they cost groups."""
        axes = self.active_axes()
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part over which FSDP works: [dp_replicate, dp_shard] (HSDP) or [dp_shard]."""
    names = mesh.mesh_dim_names or ()
    return mesh["dp_replicate", "dp_shard"] if "dp_replicate" in names else mesh["dp_shard"]
