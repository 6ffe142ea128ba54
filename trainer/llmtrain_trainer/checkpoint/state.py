"""What a checkpoint holds: parameters and optimizer moments by name, and each rank's random number generators."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic.alias_generators import to_camel
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.checkpoint.manifest import Manifest
from llmtrain_trainer.errors import CheckpointError, UserError
from llmtrain_trainer.optim.sharded import ShardedOptimizer
from llmtrain_trainer.parallel.pieces import Piece, whole_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingState:
    """What a run needs to go on, as it lies in memory."""

    optimizer: ShardedOptimizer
    """And the parameters it moves."""
    others: Mapping[str, Tensor]
    """Small tensors that ranks hold whole, for instance the routers' loads, by name."""

    def locals(self) -> dict[str, tuple[Piece, Tensor]]:
        """Return every tensor by the name it has in a checkpoint: this rank's part, and which part that is."""
        found: dict[str, tuple[Piece, Tensor]] = {}
        for name, shard in self.optimizer.shards.items():
            piece = self.optimizer.pieces[name]
            found[f"model.{name}"] = piece, shard
            for moment, local in self.optimizer.moments(name).items():
                found[f"optimizer.{moment}.{name}"] = piece, local
        return found | {name: (whole_of(tensor), tensor) for name, tensor in self.others.items()}


def tensors(state: TrainingState) -> dict[str, Tensor]:
    """Return every tensor of the training state by name, as this rank's pieces in the live memory."""
    return {name: piece.describe(local) for name, (piece, local) in state.locals().items()}


def snapshot(live: TrainingState, rank: int) -> dict[str, Any]:
    """Return a copy of the state in host memory, which training can no longer change."""
    state: dict[str, Any] = {}
    for name, (piece, local) in live.locals().items():
        state[name] = piece.describe(local.to("cpu", copy=True))
    return {**state, **random_state(rank)}


def whole_bytes(snapshot: Mapping[str, Any]) -> int:
    """Return what the tensors of all ranks take on disk together, as far as one rank's snapshot tells."""
    shapes = ((getattr(tensor, "global_shape", tensor.shape), tensor.element_size()) for tensor in snapshot.values())
    return sum(math.prod(shape) * size for shape, size in shapes)


def random_state(rank: int) -> dict[str, Tensor]:
    """Return this rank's generators as byte tensors under names of its own."""
    state = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return state


def restore(
    fill: Callable[[dict[str, Tensor]], None], manifest: Manifest, live: TrainingState, *, rank: int, same_layout: bool
) -> None:
    """Load a verified checkpoint into the live state. Needs no other rank: each reads what its own shards need.

    Args:
        fill: reads tensors by name, in place; raises CheckpointError where it cannot.
        manifest: of the checkpoint.
        live: what is filled.
        rank: this one.
        same_layout: it was made by ranks laid out as they are now, so that their generators go on too.
    """
    generators = random_state(rank) if same_layout else {}
    fill({**tensors(live), **generators})
    if same_layout:
        torch.set_rng_state(generators[f"random.{rank}.cpu"])
        if (cuda := generators.get(f"random.{rank}.cuda")) is not None:
            torch.cuda.set_rng_state(cuda)
    else:
        log.warning(
            "the checkpoint was made by %d ranks in another layout: random generators start anew from the seed",
            manifest.world_size,
        )


def read(folder: Path, state: dict[str, Tensor], reader: FileSystemReader | None = None) -> None:
    """Fill tensors by name, in place, from a verified checkpoint. Needs no process group; other names are not read.

    `reader` is for one that does not simply lie in `folder`.

    Raises:
        CheckpointError: it cannot be read although it verified.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist is what we want
            load(dict(state), storage_reader=reader or FileSystemReader(folder), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} verifies but cannot be loaded: {first_problem(error)}") from error
    except (RuntimeError, KeyError, ValueError, OSError) as error:
        raise CheckpointError(f"{folder} verifies but cannot be loaded: {error}") from error


def check_model(manifest: Manifest, wanted: ModelDimensions) -> None:
    """Refuse to load a checkpoint of another model.

    Raises:
        UserError: naming the first dimension that differs.
    """
    held, asked = manifest.model.model_dump(), wanted.model_dump()
    for field, value in asked.items():
        if held[field] != value:
            raise UserError(
                f"model.{to_camel(field)}",
                value,
                f"the checkpoint of step {manifest.step} in the job's store was made with {held[field]}",
                allowed=f"{held[field]}, as long as the job goes on from its checkpoints",
                fix="set it back, or give the changed model a new checkpoint.store",
            )


def check_optimizer(manifest: Manifest, name: str) -> None:
    """Refuse moments of another rule: they mean something else.

    Raises:
        UserError: the checkpoint was made by another optimizer.
    """
    if manifest.optimizer != name:
        raise UserError(
            "training.optimizer.name",
            name,
            f"the checkpoint of step {manifest.step} in the job's store was made by {manifest.optimizer}",
            allowed=f"{manifest.optimizer}, as long as the job goes on from its checkpoints",
            fix="set it back, or give the job a new checkpoint.store",
        )


def first_problem(error: CheckpointException) -> str:
    """Return in one line what went wrong, and where: torch's own text is a page of traces from every rank."""
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())[:500]}"
    return type(error).__name__
