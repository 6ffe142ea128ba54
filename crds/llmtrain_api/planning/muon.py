"""What muon computes beside an elementwise rule (trainer: optim/muon.py)."""

from __future__ import annotations

from llmtrain_api.planning.layout import Layout, Stage

ITERATIONS = 5


def muon_flops(layout: Layout, stages: list[Stage]) -> float:
    """Return the FLOPs of a rank's part of all matrices of some stages: the ranks that hold them share the work."""
    dims, head = layout.work.dims, layout.work.dims.head_dim
    attention = 2 * _flops(dims.dim, dims.heads * head) + 2 * _flops(dims.dim, dims.kv_heads * head)
    total = 0.0
    for stage in stages:
        total += stage.layers * attention + stage.dense * 3 * _flops(dims.dim, dims.ffn_dim)
        if dims.moe is not None:
            shared = 3 * _flops(dims.dim, dims.moe.shared_experts * dims.moe.ffn_dim)
            total += stage.mixtures * (3 * dims.moe.experts * _flops(dims.dim, dims.moe.ffn_dim) + shared)
    return total / layout.copy_ranks


def _flops(rows: int, columns: int) -> float:
    """Of five iterations: the matrix by its transpose, that by itself, and the sum by the matrix."""
    short, long = sorted((rows, columns))
    return ITERATIONS * (4.0 * short**2 * long + 2.0 * short**3)
