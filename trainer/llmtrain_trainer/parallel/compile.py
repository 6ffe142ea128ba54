"""torch.compile of each layer: its kernels fused, in one piece or around what cannot be compiled.

Blocks are compiled, not the model (as torchtitan does): layers are alike, so one compilation serves all of them, and
hooks on a layer (FSDP2's, recomputation's) stay outside of what is compiled. Collectives and mixtures of experts, whose
shapes depend on the data, stay as they are: a layer is compiled around them.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from llmtrain_trainer.errors import UserError
from llmtrain_trainer.model.moe import MixtureOfExperts
from llmtrain_trainer.model.transformer import Transformer

COMPILERS = ("g++", "clang++", "c++")
_FIELD = "training.compile"
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def compile_layers(model: Transformer) -> None:
    """Compile the forward of every layer in place. Goes before recomputation: what is repeated is compiled too.

    The first step waits for the compiler.
    """
    for block in model.blocks():
        if isinstance(block.feed_forward, MixtureOfExperts):
            mixture: nn.Module = block.feed_forward
            mixture.forward = torch.compiler.disable(mixture.forward)
        layer: nn.Module = block
        layer.forward = torch.compile(layer.forward, dynamic=False)


def prepare_compiler(device: torch.device, work_dir: Path) -> None:
    """Check that there is a compiler, and let what it makes outlive the process: a restarted rank finds it.

    Raises:
        UserError: there is none.
    """
    wanted = os.environ.get("CXX") or next((name for name in COMPILERS if shutil.which(name)), "")
    if not wanted or not shutil.which(wanted.split()[0]):
        missing = "a C++ compiler"
    elif device.type == "cuda" and not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        missing = "Python's C headers"
    else:
        if os.environ.get(_CACHE, default_cache_dir()) == default_cache_dir():  # importing torch can set its default
            os.environ[_CACHE] = str(work_dir / "compiled")
        return
    raise UserError(
        _FIELD,
        True,
        f"torch.compile needs {missing}, and this worker has none",
        allowed="false, or true in an image with g++ and python3-dev",
        fix="leave it out, or set workers.image to an image made from this one with apt-get install g++ python3-dev",
    )
