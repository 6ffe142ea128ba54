"""Why no layout can be chosen: in one wording for `llmtrain plan`, `llmtrain validate` and the operator."""

from __future__ import annotations

from typing import Any

from llmtrain_api.planning.estimate import Estimate
from llmtrain_api.planning.machine import Machine
from llmtrain_api.planning.shapes import AXES
from llmtrain_api.spec import Parallelism
from llmtrain_api.validation import FieldProblem, validate

FIELD = "spec.parallelism.planFor"


def nothing_fits(
    manifest: dict[str, Any], machine: Machine, nearest: Estimate | None, advised: list[str]
) -> FieldProblem:
    """Return what is wrong with a valid job for which a plan found nothing that fits.

    Args:
        nearest: the legal layout that needs least memory; None where none is legal.
        advised: what would help, each by itself.
    """
    if nearest is None:
        return _nothing_legal(manifest, machine, advised)
    parts = {name: getattr(nearest.memory, name) for name in ("weights", "gradients", "optimizer", "activations")}
    most = max(parts, key=lambda name: parts[name])
    ranks = "a rank" if machine.cores is None else "all ranks of a worker together"
    return FieldProblem(
        path=FIELD,
        value=machine.name,
        allowed=f"{machine.memory_bytes / 1e9:.1f} GB for {ranks}; the nearest, {layout_text(nearest.axes)}, needs "
        f"{nearest.memory.total / 1e9:.1f} GB a rank, {parts[most] / 1e9:.1f} of it {most}",
        fix="; or ".join(advised) or "use a smaller model, a shorter model.sequenceLength or a larger machine",
        message=f"no layout fits {machine.name}",
    )


def layout_text(axes: Parallelism) -> str:
    """Return a layout as its fields; those of 1 are left out."""
    parts = [f"{axis} {getattr(axes, axis)}" for axis in AXES if getattr(axes, axis) > 1]
    if axes.pipeline > 1:
        parts.append(axes.pipeline_schedule)
    return ", ".join([*parts, f"zeroStage {axes.zero_stage}", f"recompute {axes.recompute}"])


def _nothing_legal(manifest: dict[str, Any], machine: Machine, advised: list[str]) -> FieldProblem:
    """Only with planFor, so the default layout breaks a rule too: its message says best what is in the way."""
    spec = manifest["spec"]
    first = validate({**manifest, "spec": {**spec, "parallelism": {}}})[0]
    return FieldProblem(
        path=FIELD,
        value=machine.name,
        allowed=f"a job that some layout can share out; already with the default layout {first.path} is {first.value}, "
        f"and allowed: {first.allowed}",
        fix="; or ".join([first.fix, *advised]),
        message=f"no layout is legal, on {machine.name} or elsewhere",
    )
