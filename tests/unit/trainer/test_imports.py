"""What every module of the product needs at import: nothing that only a machine with a GPU has, and no extra."""

from __future__ import annotations

import subprocess
import sys

FORBIDDEN = (
    *("triton", "pynvml", "transformer_engine", "flash_attn", "apex", "cupy", "torchao"),  # CUDA only
    *("wandb", "tensorboard", "torch.utils.tensorboard"),  # extras
)
OF_EXTRAS = tuple(f"llmtrain_trainer.metrics.to_{name}" for name in ("tensorboard", "wandb"))
"""Imported by a job that asks for them, and by nothing else."""

IMPORT_ALL = f"""
import importlib, importlib.abc, pkgutil, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in {FORBIDDEN}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
count = 0
for package in ("llmtrain_api", "llmtrain_operator", "llmtrain_trainer"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith(".__main__") and module.name not in {OF_EXTRAS}:
            importlib.import_module(module.name)
            count += 1
import torch
print(count, torch.cuda.is_initialized(), [name for name in {FORBIDDEN} if name in sys.modules])
"""


def test_nothing_needs_a_gpu_or_an_extra_to_be_imported() -> None:
    """Refused at the door, as where they are not installed; whoever wants one anyway has to do without it."""
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    count, initialised, found = done.stdout.split(maxsplit=2)
    assert int(count) > 150, "hardly anything was imported"
    assert (initialised, found.strip()) == ("False", "[]")
