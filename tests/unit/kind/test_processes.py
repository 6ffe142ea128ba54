"""Processes are known by pid and start time: a recycled pid is never taken for ours."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain_kind import processes
from llmtrain_kind.errors import ClusterError
from llmtrain_kind.locks import locked


@pytest.fixture
def started(tmp_path: Path) -> Iterator[processes.Process]:
    """A `sleep` started as a cluster's component is."""
    with locked(tmp_path / "lock") as lock:
        processes.start(["sleep", "300"], tmp_path / "pids" / "sleep", tmp_path / "log", lock, {})
    record = processes.read_record(tmp_path / "pids" / "sleep")
    assert record is not None
    yield record
    record.kill()


def wait_for_program(process: processes.Process, name: str) -> None:
    """The record is there before the program: wait for the exec."""
    deadline = time.monotonic() + 30
    while name not in Path(f"/proc/{process.pid}/cmdline").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(f"42 (etcd) S {'0 ' * 18}777 0", ("S", 777), id="plain"),
        pytest.param(f"42 (a b) R) Z {'0 ' * 18}777 0", ("Z", 777), id="blanks and parentheses in the name"),
    ],
)
def test_state_and_start_time_are_read_behind_the_name(line: str, expected: tuple[str, int]) -> None:
    assert processes.parse_stat(line) == expected


def test_a_started_process_is_recorded_alive_and_in_a_session_of_its_own(started: processes.Process) -> None:
    assert started.alive()
    assert os.getsid(started.pid) == started.pid
    assert processes.find_process(started.pid) == started
    wait_for_program(started, "sleep")
    assert started.alive()


def test_a_recycled_pid_is_neither_alive_nor_killed(started: processes.Process) -> None:
    for other in (replace(started, start_ticks=started.start_ticks - 1), replace(started, boot_id="another")):
        assert not other.alive()
        other.kill()
    assert started.alive()


def test_end_all_returns_when_all_are_gone(started: processes.Process) -> None:
    processes.end_all([started, replace(started, start_ticks=1)])
    assert not started.alive()
    started.kill()


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    process = processes.find_process(child.pid)
    assert process is not None
    deadline = time.monotonic() + 30
    while process.alive():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert Path(f"/proc/{child.pid}").exists()
    child.wait()


@pytest.mark.parametrize("text", ["", "12", "nonsense\nboot\n"], ids=["empty", "cut short", "nonsense"])
def test_an_unreadable_record_names_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "record").write_text(text)
    assert processes.read_record(tmp_path / "record") is None
    assert processes.read_record(tmp_path / "none") is None


def test_a_program_that_is_not_there_is_an_error_or_a_dead_record(tmp_path: Path) -> None:
    with locked(tmp_path / "lock") as lock:
        try:
            processes.start(["/nowhere/program"], tmp_path / "record", tmp_path / "log", lock, {})
        except ClusterError as error:
            assert "/nowhere/program" in str(error)
    record = processes.read_record(tmp_path / "record")
    deadline = time.monotonic() + 30
    while record is not None and record.alive():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert "/nowhere/program" in (tmp_path / "log").read_text()


def test_the_lock_is_held_until_the_child_is_recorded(tmp_path: Path) -> None:
    """Whoever gets the lock after a killed starter finds the record of whatever it had begun to start."""
    for number in range(20):
        record = tmp_path / f"record-{number}"
        starter = os.fork()
        if starter == 0:
            with locked(tmp_path / "lock") as lock:
                subprocess.Popen(["/bin/sh", "-c", processes._LAUNCHER, "sh", str(record), "sleep", "300"], stdin=lock)
                os._exit(0)  # as a kill -9 would: without a look at the child
        os.waitpid(starter, 0)
        with locked(tmp_path / "lock"):
            found = processes.read_record(record)
        assert found is not None and found.alive()
        found.kill()
