"""`llmtrain plan`: what a job will need and how fast it will be, before anything is started."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from llmtrain_api.planning.advice import advice
from llmtrain_api.planning.decision import NoLayoutError, decided
from llmtrain_api.planning.estimate import Estimate
from llmtrain_api.planning.machine import MACHINES, Machine, MachineName
from llmtrain_api.planning.refusal import layout_text, nothing_fits
from llmtrain_api.planning.shapes import Plan, plan
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_api.validation import complete
from llmtrain_operator.cli.dryrun import drawn_dry_run, dry_run
from llmtrain_operator.cli.manifest import name_of, read_one
from llmtrain_operator.cli.say import UsageError, complain

NOTHING_FITS = 1
WIDTH = 140
"""Columns where nobody's terminal sets them."""
ASKED = "> "


def command(options: argparse.Namespace) -> int:
    """Return 0 where a layout fits the machine, 1 where none does.

    Raises:
        UsageError: the manifest is wrong, or a dry run is not possible here.
    """
    manifest = read_one(options.file)
    spec = LLMTrainJobSpec.model_validate(complete(manifest)["spec"])
    plan_for = spec.parallelism.plan_for
    machine = MACHINES[options.machine or plan_for or _usual_machine(spec)]
    found = plan(manifest, machine, options.top)
    advised = [] if found.best else advice(manifest, machine)
    held = dry_run(_decided(spec)) if options.dry_run else None
    if options.json:
        answer = _as_json(found, machine, advised)
        print(json.dumps({**answer, "dryRun": held} if held else answer))
    elif held and found.asked:
        _print(drawn_dry_run(name_of(manifest), held, found.asked))
    else:
        _print(_drawn(name_of(manifest), found, machine, plan_for))
    if found.best:
        return 0
    problem = nothing_fits(manifest, machine, found.smallest, advised)
    complain(f"llmtrain plan: {problem.message}; allowed: {problem.allowed}; fix: {problem.fix}")
    return NOTHING_FITS


def _decided(spec: LLMTrainJobSpec) -> LLMTrainJobSpec:
    try:
        return decided(spec)
    except NoLayoutError as error:
        raise UsageError(f"--dry-run: {error}") from error


def _usual_machine(spec: LLMTrainJobSpec) -> MachineName:
    workers = spec.workers
    return "cpu" if workers.device == "cpu" or workers.accelerator.count == 0 else "h100"


def _print(what: RenderableType) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    console.print(what)


def _drawn(name: str, found: Plan, machine: Machine, plan_for: MachineName | None) -> Table:
    count, memory = found.divisions, machine.memory_bytes / 1e9
    title = f"{name} on {machine.name}: {count} legal division{'' if count == 1 else 's'} of its ranks"
    caption = (
        f"{_meaning_of_the_mark(found, plan_for)} GB: of {memory:.0f} that {machine.name} has for use. "
        "These are estimates: docs/tasks/plan.md says how good they are."
    )
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("layout")
    for heading in ("fits", "GB", "weights", "gradients", "optimizer", "activations"):
        table.add_column(heading, justify="right")
    for heading in ("step s", "tokens/s", "MFU", "idle", "waits"):
        table.add_column(heading, justify="right")
    asked = found.asked.axes if found.asked else None
    others = [one for one in (found.asked, found.smallest) if one][:1]
    rows = found.best if asked in [one.axes for one in found.best] else [*found.best, *others]
    for one in rows:
        table.add_row(*_cells(one, asked=one.axes == asked))
    return table


def _meaning_of_the_mark(found: Plan, plan_for: MachineName | None) -> str:
    if plan_for is None:
        return f"{ASKED.strip()} as the file has it."
    if found.asked is None:
        return f"Nothing fits {plan_for}, which parallelism.planFor names."
    return f"{ASKED.strip()} will be chosen, because parallelism.planFor is {plan_for}."


def _cells(one: Estimate, *, asked: bool) -> list[str]:
    memory = one.memory
    sizes = (memory.total, memory.weights, memory.gradients, memory.optimizer, memory.activations)
    return [
        (ASKED if asked else "") + layout_text(one.axes),
        "yes" if one.fits else "no",
        *(f"{size / 1e9:.3g}" for size in sizes),
        f"{one.step_seconds:.3g}",
        f"{one.tokens_per_second:,.0f}",
        f"{one.mfu:.1%}",
        f"{one.bubble:.1%}",
        f"{one.communication:.1%}",
    ]


def _as_json(found: Plan, machine: Machine, advised: list[str]) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "memoryBytes": machine.memory_bytes,
        "divisions": found.divisions,
        "asked": _estimate_json(found.asked) if found.asked else None,
        "best": [_estimate_json(one) for one in found.best],
        "nearest": _estimate_json(found.smallest) if found.smallest else None,
        "advice": advised,
    }


def _estimate_json(one: Estimate) -> dict[str, Any]:
    memory = one.memory
    return {
        "parallelism": one.axes.to_wire(),
        "fits": one.fits,
        "memoryBytes": {
            "total": round(memory.total),
            "weights": round(memory.weights),
            "gradients": round(memory.gradients),
            "optimizer": round(memory.optimizer),
            "activations": round(memory.activations),
        },
        "stepSeconds": one.step_seconds,
        "tokensPerSecond": one.tokens_per_second,
        "mfu": one.mfu,
        "idle": one.bubble,
        "waits": one.communication,
        "sentBytes": {axis: round(size) for axis, size in one.sent.items()},
    }
