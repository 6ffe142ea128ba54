"""What a container may still take, as both versions of cgroups tell it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from llmtrain_trainer.checkpoint import local
from llmtrain_trainer.checkpoint.headroom import headroom_bytes
from llmtrain_trainer.config import RunConfig

V1 = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"
V2 = "memory.max", "memory.current", "memory.stat"


@pytest.mark.parametrize(
    ("names", "contents", "expected"),
    [
        (V2, ("1000\n", "700\n", "anon 500\ninactive_file 150\n"), 450),
        (V2, ("max\n", "700\n", "anon 500\n"), None),
        (V2, ("1000\n", "1100\n", "anon 1100\n"), -100),
        (V1, ("1000\n", "700\n", "inactive_file 9\ntotal_inactive_file 50\n"), 350),
        (V1, ("9223372036854771712\n", "700\n", "total_inactive_file 50\n"), None),
        ((), (), None),
    ],
    ids=["v2", "v2 without a limit", "v2 over it", "v1", "v1 without a limit", "no cgroups"],
)
def test_headroom(tmp_path: Path, names: tuple[str, ...], contents: tuple[str, ...], expected: int | None) -> None:
    for name, content in zip(names, contents, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert headroom_bytes(tmp_path) == expected


@pytest.mark.parametrize(
    ("name", "free", "refused"), [("memory", 399, True), ("memory", 400, False), ("disk", 0, False)]
)
def test_a_memory_tier_that_the_limit_cannot_hold_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, free: int, refused: bool
) -> None:
    """Two ranks of 200 bytes: each refuses for both, before the kernel would kill them."""
    monkeypatch.setattr(local, "headroom_bytes", lambda: free)
    launch = SimpleNamespace(local_rank=0, global_rank=0, local_world_size=2)
    tier = local.LocalTier(cast(RunConfig, SimpleNamespace(launch=launch)), name, tmp_path, every_steps=1, keep=1)
    outcome = tier._write_own(tmp_path / "staging", {"weight": torch.zeros(50)})
    assert isinstance(outcome, str) == refused == (not (tmp_path / "staging").exists())
    if isinstance(outcome, str):
        assert "leaves 0.0 MiB" in outcome and "resources.limits.memory" in outcome
