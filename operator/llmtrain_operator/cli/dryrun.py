"""The dry run of `llmtrain plan`: the trainer lays ranks out, in a process of its own because it needs torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from llmtrain_api.planning.estimate import Estimate
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_operator.cli.say import UsageError

NEEDED_MODULES = ("llmtrain_trainer", "torch")
DRY_RUN_SECONDS = 600


def dry_run(spec: LLMTrainJobSpec) -> dict[str, Any]:
    """Return what `python -m llmtrain_trainer.dryrun` found.

    Raises:
        UsageError: the trainer is not installed, or could not lay the ranks out.
    """
    for module in NEEDED_MODULES:
        if importlib.util.find_spec(module) is None:
            fix = "pip install 'llmtrain[operator,trainer]', or leave --dry-run out"
            raise UsageError(f"--dry-run: {module} is not installed: {fix}")
    try:
        answer = subprocess.run(
            [sys.executable, "-m", "llmtrain_trainer.dryrun"],
            input=json.dumps(spec.to_wire()),
            capture_output=True,
            text=True,
            check=False,
            timeout=DRY_RUN_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"--dry-run: took more than {DRY_RUN_SECONDS} s; leave it out") from error
    if answer.returncode:
        said = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
        raise UsageError(f"--dry-run: {said[-1].removeprefix('error: ')}")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def drawn_dry_run(name: str, held: dict[str, Any], asked: Estimate) -> Group:
    """Return a screen about what ranks hold, and what they will send by the planner's estimate."""
    table = Table()
    for heading in ("rank", "stages", "parameters", "parameter bytes", "gradient bytes", "optimizer bytes"):
        table.add_column(heading, justify="right")
    for rank in held["ranks"]:
        stages = ", ".join(map(str, rank["stages"]))
        numbers = (rank[key] for key in ("parameters", "parameterBytes", "gradientBytes", "optimizerBytes"))
        table.add_row(str(rank["rank"]), stages, *(f"{number:,}" for number in numbers))
    sent = ", ".join(f"{axis} {size / 1e9:.3g} GB" for axis, size in asked.sent.items()) or "nothing"
    cost = f"{held['seconds']:.1f} s, {held['peakMemoryBytes'] / 1e6:.0f} MB"
    return Group(
        Text(f"{name}: {held['parameters']:,} parameters on {held['worldSize']:,} ranks (laid out in {cost})"),
        table,
        Text(f"The busiest rank sends in a step, estimated: {sent}"),
    )
