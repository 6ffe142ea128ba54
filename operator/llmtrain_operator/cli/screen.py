"""One screen that says how a job does: state, progress bar, loss, workers, failures. Drawn from status alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmtrain_api.constants import TERMINAL_STATES, State
from llmtrain_api.job import LLMTrainJob
from llmtrain_api.status import LLMTrainJobStatus, ProgressStatus

BARS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
COLOURS = {
    State.TRAINING: "green",
    State.SUCCEEDED: "bold green",
    State.FAILED: "bold red",
    State.BLOCKED: "red",
    State.RESTARTING: "yellow",
}
FAILURES_SHOWN = 6
LOSSES_SHOWN = 60


def sparkline(values: Sequence[float]) -> str:
    """Return one character per value, from the lowest to the highest of them; values that are not finite are gaps."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)

    def bar(value: float) -> str:
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else float(value > low)
        return BARS[round(share * (len(BARS) - 1))]

    return "".join(bar(value) if math.isfinite(value) else " " for value in values)


def duration(seconds: float) -> str:
    """Return seconds in the two units that matter: 42s, 7m05s, 3h12m, 2d4h."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600}h"


def render(job: LLMTrainJob, losses: Sequence[float] = ()) -> RenderableType:
    """Draw a job. `losses` are of past steps, oldest first; without them the line is left out."""
    status = job.status
    rows: list[RenderableType] = [_headline(job)]
    if status.message:
        rows.append(Text(status.message))
    if status.progress:
        rows += _progress(status.progress, losses, status.state in TERMINAL_STATES)
    rows.append(_facts(status))
    if status.failures:
        rows.append(_failures(status))
        earlier = max(status.restarts.total, len(status.failures)) - FAILURES_SHOWN
        if earlier > 0:
            rows.append(Text(f"and {earlier} earlier", style="dim"))
    return Group(*rows)


def _headline(job: LLMTrainJob) -> Text:
    state = job.status.state or State.PENDING
    line = Text(f"{job.metadata.namespace}/{job.metadata.name}  ")
    line.append(state.value, style=COLOURS.get(state, "cyan"))
    line.append(f"  workers {job.status.workers.summary}  attempt {job.status.attempt}")
    return line


def _progress(progress: ProgressStatus, losses: Sequence[float], ended: bool) -> list[RenderableType]:
    share = progress.step / max(1, progress.steps)
    eta = "" if ended or progress.eta_seconds is None else f"  {duration(progress.eta_seconds)} left"
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=max(1, progress.steps), completed=progress.step, width=30),
        f"{share:.0%}  step {progress.step}/{progress.steps}{eta}",
    )
    line = Text(f"loss {progress.loss}  {progress.tokens_per_second} tokens/s")
    if losses:
        line.append(f"  {sparkline(losses)}", style="cyan")
    return [row, line]


def _facts(status: LLMTrainJobStatus) -> Text:
    good = status.checkpoint.last_good_step
    parts = [f"checkpoint step {good}" if good >= 0 else "no checkpoint yet"]
    if status.shape:
        shape = status.shape
        parts.append(f"{shape.world_size} ranks = {shape.replicate} x {shape.shard} (ZeRO {shape.zero_stage})")
    by_class = ", ".join(f"{count} {name}" for name, count in sorted(status.restarts.by_class.items()))
    parts.append(f"restarts {status.restarts.total}" + (f" ({by_class})" if by_class else ""))
    if status.checkpoint.skipped:
        parts.append(f"not trusted: {status.checkpoint.skipped}")
    if status.checkpoint.failed:
        parts.append(f"not saved: {status.checkpoint.failed}")
    return Text(" | ".join(parts), style="dim")


def _failures(status: LLMTrainJobStatus) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("when", "class", "who", "action", "lost steps", "to next step", "what"):
        table.add_column(title, overflow="fold")
    for failure in status.failures[-FAILURES_SHOWN:]:
        rank = "" if failure.rank is None else f" rank {failure.rank}"
        seconds = failure.seconds_to_next_step
        table.add_row(
            failure.at[11:19],
            failure.failure_class.value,
            Text(f"{failure.pod}{rank}"),
            failure.action.value,
            "" if failure.lost_steps is None else str(failure.lost_steps),
            "" if seconds is None else f"{seconds} s",
            Text(failure.message),
        )
    return table
