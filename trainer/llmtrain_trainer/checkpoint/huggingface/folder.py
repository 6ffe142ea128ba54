"""A folder of safetensors, one file or several with an index: opened and checked before any value is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmtrain_trainer.checkpoint.huggingface.config_json import FOLDER, Wrong, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_MAP = "weight_map"


class Weights:
    """Which tensor lies in which file. The files are mapped into memory: a box costs what it holds.

    Raises:
        UserError: there are no safetensors, the index is no index or names what is not there, or a file is damaged.
    """

    def __init__(self, folder: Path, wrong: Wrong) -> None:
        self._wrong = wrong
        self._slices: dict[str, Any] = {}
        if (folder / SINGLE).exists():
            self._slices = dict(self._open(folder / SINGLE))
        elif (folder / INDEX).exists():
            self._open_all(folder, read_object(folder / INDEX, wrong))
        else:
            other = "with files of another kind: " if (folder / "pytorch_model.bin").exists() else ""
            raise wrong(
                f"there is neither {SINGLE} nor {INDEX} in {folder}",
                allowed=FOLDER,
                fix=f"{other}save them as safetensors (save_pretrained does), or correct the address",
            )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor by name."""
        return {name: tuple(part.get_shape()) for name, part in self._slices.items()}

    def dtype(self, name: str) -> str:
        """Return a tensor's type as safetensors spells it: F32, BF16."""
        return str(self._slices[name].get_dtype())

    def box(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Return a box of a tensor, in the type of the file.

        Raises:
            UserError: it can no longer be read.
        """
        try:
            return self._slices[name][box]
        except (SafetensorError, OSError) as error:
            raise self._damaged(f"tensor {name} cannot be read: {error}") from error

    def _open_all(self, folder: Path, index: dict[str, Any]) -> None:
        places = index.get(WEIGHT_MAP)
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise self._damaged(f"{folder / INDEX} holds no weight_map from tensors to files")
        held: dict[str, dict[str, Any]] = {}
        for file in sorted(set(places.values())):
            if Path(file).name != file or not (folder / file).exists():
                raise self._damaged(f"{INDEX} names the file {file!r}, which is not in {folder}")
            held[file] = dict(self._open(folder / file))
        for file, found in held.items():
            self._slices |= found
            if absent := [name for name, place in places.items() if place == file and name not in found]:
                raise self._damaged(f"{INDEX} says that {absent[0]} is in {file}, and it is not")
        self._slices |= {name: held[file][name] for name, file in places.items()}

    def _open(self, path: Path) -> Iterator[tuple[str, Any]]:
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118  not a dictionary
                yield name, file.get_slice(name)
        except (SafetensorError, OSError) as error:
            raise self._damaged(f"{path} is damaged or no safetensors file: {error}") from error

    def _damaged(self, problem: str) -> Exception:
        return self._wrong(problem, allowed=FOLDER, fix="copy the whole folder there anew")
