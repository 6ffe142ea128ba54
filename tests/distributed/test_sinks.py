"""The sinks of spec.metrics in real runs, read back by the packages they are for; and that no bit depends on them."""

from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore

from tests.support.ports import free_port
from tests.support.ranks import Gang, Job

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

ENDLESS: dict[str, Any] = {"steps": 100_000, "schedule": {"kind": "constant"}}
"""With a constant rate no loss depends on the number of steps."""
WANDB_FILES = "wandb/offline-run-*/*.wandb"


def _fetched(port: int) -> str:
    try:
        return str(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode())
    except urllib.error.URLError:
        return ""


def _complaints(gang: Gang) -> dict[str, str]:
    failed = gang.events("sink_failed")
    assert len({event["sink"] for event in failed}) == len(failed), "each is told once"
    return {event["sink"]: event["reason"] for event in failed}


def _board(folder: Path) -> dict[int, float]:
    """Return the losses that TensorBoard draws."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    points = [(event.step, event.value) for event in accumulator.Scalars("loss")]
    assert len(dict(points)) == len(points), "a step that was repeated is there once"
    return dict(points)


def _wandb_runs(folder: Path) -> list[tuple[str, dict[int, float]]]:
    """Return id and losses of each attempt, as `wandb sync` would send them."""
    runs = []
    for path in sorted(folder.glob(WANDB_FILES)):
        store, run, losses = DataStore(), "", {}
        store.open_for_scan(str(path))
        while (data := store.scan_data()) is not None:
            record = Record.FromString(data)
            run = record.run.run_id or run
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if "loss" in row:
                losses[int(json.loads(row["step"]))] = float(json.loads(row["loss"]))
        runs.append((run, losses))
    return runs


def test_every_sink_hears_every_step_of_every_attempt(new_job: Callable[..., Job], tmp_path: Path) -> None:
    port, board = free_port(), tmp_path / "board"
    wanted = {
        "tensorboard": {"uri": f"file://{board}"},
        "wandb": {"project": "tests", "mode": "offline"},
        "prometheus": {"port": port},
    }
    job = new_job("told", training=ENDLESS, metrics=wanted)
    gang = job.launch(2)
    gang.until(lambda: "llmtrain_training_step " in _fetched(port), "Prometheus finds a step")
    gang.until(lambda: any(path.stat().st_size for path in job.store.glob(WANDB_FILES)), "W&B has begun")
    gang.signal(signal.SIGKILL)
    gang.wait()
    assert _complaints(gang) == {}
    assert _fetched(port) == "", "the endpoint ends with its rank"
    last = gang.last_step() + 4
    again = job.run(2, changes={"training": {"steps": last}})
    assert again.wait() == [0, 0], again.output()
    assert _complaints(again) == {}
    losses = job.losses()
    assert len(losses) == last
    drawn, own = _board(board), set(range(again.events("resumed")[0]["step"] + 1, last + 1))
    assert own <= set(drawn), "what the killed attempt had not yet written may be missing, nothing of this one"
    assert drawn == pytest.approx({step: losses[step - 1] for step in drawn}, rel=1e-6), "single precision"
    (first, _), (second, told) = _wandb_runs(job.store)
    assert first == second, "one run for all attempts"
    assert told == {step: losses[step - 1] for step in own}
    alone = new_job("alone", training=ENDLESS)
    assert alone.run(2, changes={"training": {"steps": last}}).wait() == [0, 0]
    assert alone.losses() == losses, "to the last bit"


def test_sinks_that_cannot_work_are_told_once_and_no_bit_changes(
    new_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-folder").write_text("")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", port := free_port()))
        taken.listen()
        wanted = {
            "tensorboard": {"uri": f"file://{tmp_path}/no-folder"},
            "wandb": {"project": "tests"},
            "prometheus": {"port": port},
        }
        job = new_job("told", metrics=wanted)
        nobody = {"WANDB_API_KEY": "", "NETRC": str(tmp_path / "none"), "HOME": str(tmp_path)}
        gang = job.run(2, environment=nobody)
    assert gang.wait() == [0, 0], gang.output()
    complaints = _complaints(gang)
    assert set(complaints) == set(wanted)
    assert "FileExistsError" in complaints["tensorboard"] or "NotADirectoryError" in complaints["tensorboard"]
    assert "WANDB_API_KEY" in complaints["wandb"] and "workers.template" in complaints["wandb"]
    assert f"metrics.prometheus.port {port}" in complaints["prometheus"]
    alone = new_job("alone")
    assert alone.run(2).wait() == [0, 0]
    assert alone.losses() == job.losses(), "to the last bit"


def test_a_server_of_wandb_that_is_away_is_told(new_job: Callable[..., Job]) -> None:
    job = new_job("told", training={"steps": 3}, metrics={"wandb": {"project": "tests"}})
    away = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}", "WANDB_INIT_TIMEOUT": "2"}
    gang = job.run(1, environment=away)
    assert gang.wait() == [0], gang.output()
    assert "wandb" in _complaints(gang), gang.output()
