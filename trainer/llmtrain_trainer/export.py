"""`python -m llmtrain_trainer.export STORE OUT`: a job's checkpoint as a folder that Hugging Face transformers loads.

STORE is the folder of spec.checkpoint.store, of a job that runs or has ended; nothing in it is changed. What is not
good is said in one line with exit code 64 (what was asked cannot be) or 77 (the checkpoint is damaged).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from llmtrain_api.constants import ExitCode
from llmtrain_trainer.checkpoint.huggingface.save import SHARD_BYTES, save
from llmtrain_trainer.checkpoint.manifest import BadCheckpoint, Manifest
from llmtrain_trainer.checkpoint.store import CheckpointStore
from llmtrain_trainer.errors import CheckpointError, UserError

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ExportError(Exception):
    """What was asked cannot be; the text holds the argument, its value, what is wrong, what is allowed and the fix."""

    def __init__(self, argument: str, value: object, problem: str, *, allowed: str, fix: str) -> None:
        super().__init__(f"{argument}: {str(value)!r}: {problem}; allowed: {allowed}; fix: {fix}")


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    store, out = Path(options.store), Path(os.path.abspath(options.out))
    try:
        _check_out(out)
        root, manifest = _choose(store, options.step)
        folder = root.folder_of(manifest)
        written = save(folder, manifest, out, dtype=TYPES[options.dtype], max_shard_bytes=options.max_shard_bytes)
    except (ExportError, UserError) as error:
        return _complain(error, ExitCode.USER_ERROR)
    except CheckpointError as error:
        return _complain(error, ExitCode.CHECKPOINT)
    except OSError as error:
        allowed, fix = "a folder that may be made, with room in it", "make room there, or choose another"
        unwritable = ExportError("OUT", out, f"it cannot be written: {error}", allowed=allowed, fix=fix)
        return _complain(unwritable, ExitCode.USER_ERROR)
    print(
        f"{out}: step {manifest.step}, {written.bytes:,} bytes of tensors ({options.dtype}) in {written.files} file(s)"
    )
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m llmtrain_trainer.export",
        description="Write a job's checkpoint as a folder that transformers loads: config.json and safetensors.",
    )
    parser.add_argument("store", metavar="STORE", help="the folder of spec.checkpoint.store; it is only read")
    parser.add_argument("out", metavar="OUT", help="the folder to make; one that exists must be empty")
    parser.add_argument("--step", type=int, help="which checkpoint (default: the newest of which every byte verifies)")
    parser.add_argument("--dtype", choices=sorted(TYPES), default="fp32", help="of the tensors written (default: fp32)")
    parser.add_argument(
        "--max-shard-bytes",
        type=_positive,
        default=SHARD_BYTES,
        metavar="N",
        help=f"most bytes of tensors in one file, and of whole files in memory (default: {SHARD_BYTES})",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a whole number of bytes, 1 or more")
    return int(text)


def _check_out(out: Path) -> None:
    """Refuse before anything is read what could not be written at the end.

    Raises:
        ExportError: something lies at `out`.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        problem = "it is no folder"
    elif out.is_dir() and any(out.iterdir()):
        problem = "the folder is not empty"
    else:
        return
    raise ExportError("OUT", out, problem, allowed="what does not exist, or an empty folder", fix="choose another")


def _choose(folder: Path, step: int | None) -> tuple[CheckpointStore, Manifest]:
    """Return the store and the manifest of the checkpoint to write, verified.

    Raises:
        ExportError: there is no store, or no such checkpoint in it.
        CheckpointError: the checkpoint does not verify.
    """
    try:
        store = CheckpointStore.to_read(folder)
    except BadCheckpoint as error:
        fix = "name the folder that spec.checkpoint.store means on this machine"
        raise ExportError("STORE", folder, str(error), allowed="the folder of a job's checkpoints", fix=fix) from error
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        problem = "there is no checkpoint of this step" if steps else "no checkpoint has been committed there"
        argument, value = ("STORE", folder) if step is None else ("--step", step)
        allowed = ", ".join(map(str, steps)) or "a store with a checkpoint"
        raise ExportError(
            argument, value, problem, allowed=allowed, fix="choose one of them, or let the job commit one"
        )
    if step is None:
        found = store.newest_good()
        if found.manifest is None:
            raise CheckpointError("; ".join(found.skipped[1:]))
        for reason in found.skipped:
            print(f"skipped {reason}", file=sys.stderr)
        return store, found.manifest
    try:
        return store, store.good(step)
    except BadCheckpoint as error:
        raise CheckpointError(f"step {step} in {folder}: {error}; fix: choose another of {steps}") from error


def _complain(problem: object, code: ExitCode) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
