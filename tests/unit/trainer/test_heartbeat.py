"""The heartbeat file: what is written is read, by another process, torn or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmtrain_api.sync_beat import PHASES
from llmtrain_trainer.heartbeat import Heartbeat, read

WRITER = """
import sys
from llmtrain_trainer.heartbeat import Heartbeat
heart, step = Heartbeat(sys.argv[1]), 0
print("up", flush=True)
while True:
    step += 1
    heart.enter("data_loading", step)
    heart.enter("forward")
"""
STACKED = """
import sys, threading
from llmtrain_trainer.heartbeat import dump_stacks_at_signal
dump_stacks_at_signal(sys.argv[1])
def stuck_here():
    print("up", flush=True)
    open(sys.argv[2]).read()
threading.Thread(target=threading.Event().wait, daemon=True).start()
stuck_here()
"""


def test_what_is_entered_is_read(tmp_path: Path) -> None:
    heart = Heartbeat(str(tmp_path / "beat"))
    assert read(tmp_path / "beat") is None and read(tmp_path / "absent") is None
    for step, phase in enumerate(PHASES, 1):
        before = time.monotonic()
        heart.enter(phase, step)
        beat = read(tmp_path / "beat")
        assert beat and (beat.phase, beat.step) == (phase, step)
        assert before <= beat.since <= time.monotonic()


def test_first_step_and_checkpoints_do_not_count_as_a_step(tmp_path: Path) -> None:
    heart = Heartbeat(str(tmp_path / "beat"))
    for step in range(1, 6):
        heart.enter("data_loading", step)
        time.sleep(0.3 if step == 1 else 0.01)
        heart.enter("checkpoint")
        time.sleep(0.3 if step == 3 else 0.0)
    heart.enter("finish")
    beat = read(tmp_path / "beat")
    assert beat and beat.measured_steps == 3
    assert 0.01 <= beat.step_p99 < beat.checkpoint_p99
    assert beat.checkpoint_p99 >= 0.3


@given(torn=st.binary(min_size=1, max_size=96), place=st.integers(0, 191))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_torn_newest_slot_leaves_the_one_before(torn: bytes, place: int, tmp_path: Path) -> None:
    file = tmp_path / "beat"
    heart = Heartbeat(str(file))
    heart.enter("forward", 7)
    heart.enter("backward")
    data = bytearray(file.read_bytes())
    place = place % 96  # beat 2 lies in the first slot
    data[place : min(place + len(torn), 96)] = torn[: 96 - place]
    file.write_bytes(data)
    beat = read(file)
    assert beat and beat.step == 7 and beat.phase in ("forward", "backward")


def test_writer_in_another_process_is_never_read_torn_and_its_stop_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "beat"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(file)], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout and writer.stdout.readline()
            last, seen = 0, 0
            while seen < 2000:
                beat = read(file)
                if beat is None:  # a writer in a tight loop may overtake every try
                    continue
                assert beat.phase in ("data_loading", "forward") and beat.step >= last
                last, seen = beat.step, seen + 1
            os.kill(writer.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
            assert read(file) == read(file) is not None
        finally:
            writer.kill()


def test_stuck_process_writes_the_stacks_of_all_threads(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    command = [sys.executable, "-c", STACKED, str(tmp_path / "stacks"), str(tmp_path / "fifo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stuck:
        try:
            assert stuck.stdout and stuck.stdout.readline()
            os.kill(stuck.pid, signal.SIGUSR2)
            deadline = time.monotonic() + 60
            while "stuck_here" not in (text := (tmp_path / "stacks").read_text()):
                assert time.monotonic() < deadline, text
                time.sleep(0.01)
            assert text.count("most recent call first") == 2
        finally:
            stuck.kill()


def test_beat_without_a_file_goes_nowhere() -> None:
    Heartbeat().enter("forward", 1)


def test_unwritable_file_is_told() -> None:
    with pytest.raises(OSError):
        Heartbeat("/proc/nowhere/beat")
