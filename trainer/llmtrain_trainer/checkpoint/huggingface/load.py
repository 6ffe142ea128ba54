"""First weights from a folder of theirs: each rank checks all of it, and reads only the boxes that it holds."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from llmtrain_trainer.checkpoint.huggingface import config_json
from llmtrain_trainer.checkpoint.huggingface.families import Family, Part, family_of, parameter_shapes, parts_of
from llmtrain_trainer.checkpoint.huggingface.folder import Weights
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.distributed import Ranks
from llmtrain_trainer.errors import UserError
from llmtrain_trainer.parallel.pieces import Piece

FIELD = "model.initFrom"
HARMLESS = ("rotary_emb.inv_freq",)
"""Ends of names that old files hold and nobody needs: they follow from config.json."""
TYPES = ("F32", "BF16", "F16")
"""fp32 holds all their values."""
NAMED = 3
"""Tensors named in a message; of more only the number is told."""


def open_first_weights(config: RunConfig, ranks: Ranks) -> FirstWeights | None:
    """Open and check what model.initFrom names, and make sure that all workers see the same; None where it is not set.

    Raises:
        UserError: it is not the whole of this job's model, or differs between workers.
        PeerLostError: rank 0 is gone.
    """
    uri = config.spec.model.init_from
    if uri is None:
        return None
    weights = FirstWeights(config, uri)
    own = weights.fingerprint()
    if config.is_first:
        ranks.tell("first-weights", own)
    elif ranks.hear("first-weights") != own:
        raise UserError(
            FIELD,
            uri,
            f"worker {config.launch.node_rank} sees other weights than worker 0",
            allowed="the same files in every worker",
            fix="use a volume that all workers share, or copy the same files to every node",
        )
    return weights


class FirstWeights:
    """What model.initFrom names, found to be the whole of this job's model.

    Raises:
        UserError: naming what is missing, too much, of another shape, or computed otherwise by our model.
    """

    def __init__(self, config: RunConfig, uri: str) -> None:
        self._uri = uri
        folder = config.local_path(FIELD, uri)
        if not os.path.isdir(folder):  # unlike Path's, False also where the way to it may not be searched
            problem, fix = f"there is no folder {folder}", "correct the address, or mount the volume that holds it"
            raise self._wrong(problem, allowed=config_json.FOLDER, fix=fix)
        family = family_of(config.dimensions, untrained=True)
        described = config_json.read(folder, self._wrong)
        for difference in config_json.differences(described, family, config.dimensions):
            problem = f"in {folder / config_json.NAME} {difference.problem}"
            raise self._wrong(problem, allowed=difference.allowed, fix=difference.fix)
        self._weights = Weights(folder, self._wrong)
        self._parts = parts_of(family, parameter_shapes(config.dimensions))
        # Where they are tied, transformers does not look at the first of the two, even where it is there.
        tied = dict([family.tied]) if described.get("tie_word_embeddings") else {}
        self._sources = {part.theirs: tied.get(part.theirs, part.theirs) for part in self._parts}
        self._check(family, ignored=set(tied))

    def fingerprint(self) -> str:
        """Return a hash over name, shape, type and first row of every tensor: cheap, and other weights differ."""
        digest = hashlib.sha256()
        for part in self._parts:
            source = self._sources[part.theirs]
            first = self._weights.box(source, (slice(0, 1), *(slice(0, n) for n in part.shape[1:])))
            digest.update(json.dumps([source, part.shape, self._weights.dtype(source)]).encode())
            digest.update(first.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def fill(self, shards: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> None:
        """Copy into each shard, in place and cast to its type, the box of its parameter that its piece describes."""
        for part in self._parts:
            if part.ours in pieces:
                self._fill(part, shards[part.ours], pieces[part.ours])

    def _fill(self, part: Part, shard: Tensor, piece: Piece) -> None:
        box = tuple(slice(offset, offset + size) for offset, size in zip(piece.offsets, piece.sizes, strict=True))
        if part.index is not None:
            row = part.index - piece.offsets[0]
            if not 0 <= row < piece.sizes[0]:
                return
            shard, box = shard[row], box[1:]
        if shard.numel():
            shard.copy_(self._weights.box(self._sources[part.theirs], box))

    def _check(self, family: Family, ignored: set[str]) -> None:
        found = self._weights.shapes()
        if stacked := [name for name in found if family.stacked and name.endswith(family.stacked)]:
            problem, allowed = f"tensor {stacked[0]} holds all experts of a layer", "tensors of one expert each"
            fix = "save them anew by save_pretrained, without save_original_format=False"
            raise self._wrong(problem, allowed=allowed, fix=fix)
        wanted = {self._sources[part.theirs]: part for part in reversed(self._parts)}
        missing = [name for name in wanted if name not in found]
        if missing:
            fix = "copy the whole folder there anew, or choose weights of this model"
            raise self._wrong(f"no tensor {_some(missing)}", allowed=f"all {len(wanted)} tensors of the model", fix=fix)
        extra = [name for name in found if not (name in wanted or name in ignored or name.endswith(HARMLESS))]
        if extra:
            problem = f"tensor {_some(extra)}, for which this model has no place"
            allowed, fix = f"the {len(wanted)} tensors of the model alone", "choose weights of this model"
            raise self._wrong(problem, allowed=allowed, fix=fix)
        for name, part in wanted.items():
            self._check_tensor(name, found[name], part)

    def _check_tensor(self, name: str, shape: tuple[int, ...], part: Part) -> None:
        if shape != part.shape:
            dims = zip(part.fields, shape, part.shape, strict=True) if len(shape) == len(part.shape) else ()
            deciding = sorted({field for field, found, wanted in dims if found != wanted} or set(part.fields))
            fields = " and ".join(f"model.{field}" for field in deciding)
            raise self._wrong(
                f"tensor {name} has the shape {list(shape)}",
                allowed=f"{list(part.shape)}, which {fields} decides",
                fix=f"correct {fields}, or choose other weights",
            )
        if self._weights.dtype(name) not in TYPES:
            problem, fix = f"tensor {name} is of type {self._weights.dtype(name)}", "save them in float32 or bfloat16"
            raise self._wrong(problem, allowed=", ".join(TYPES), fix=fix)

    def _wrong(self, problem: str, *, allowed: str, fix: str) -> UserError:
        return UserError(FIELD, self._uri, problem, allowed=allowed, fix=fix)


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more
