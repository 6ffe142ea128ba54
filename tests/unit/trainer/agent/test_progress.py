"""Only the newest progress of the attempt that runs now is kept."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtrain_trainer.agent.eventlog import EventLog
from llmtrain_trainer.agent.progress import ProgressInbox


class Sender:
    def __init__(self, inbox: ProgressInbox) -> None:
        self._inbox = inbox

    def raw(self, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(data, str(self._inbox.path))

    def step(self, attempt: int, step: int) -> None:
        record = {"attempt": attempt, "step": step, "firstStep": 1, "firstStepAt": 1.0, "steps": 9, "tokens": 1}
        self.raw(json.dumps({**record, "loss": 2.5, "stepAt": 2.0, "newField": "ignored"}).encode())


@pytest.fixture
def inbox(tmp_path: Path) -> Iterator[tuple[ProgressInbox, Sender, io.StringIO]]:
    output = io.StringIO()
    made = ProgressInbox(tmp_path / "p", EventLog(output), lambda: None)
    yield made, Sender(made), output
    made.close()


def test_newest_step_counts(inbox: tuple[ProgressInbox, Sender, io.StringIO]) -> None:
    box, sender, _ = inbox
    box.expect(2)
    assert not box.drain() and box.newest is None
    for step in (1, 2, 3):
        sender.step(2, step)
    assert box.drain() and box.newest and box.newest.step == 3


def test_other_attempts_do_not_count(inbox: tuple[ProgressInbox, Sender, io.StringIO]) -> None:
    box, sender, _ = inbox
    box.expect(2)
    sender.step(2, 7)
    box.drain()
    sender.step(2, 8)  # still in the socket when the next attempt starts
    box.expect(3)
    sender.step(2, 9)
    assert not box.drain() and box.newest is None
    sender.step(3, 4)
    assert box.drain() and box.newest and (box.newest.attempt, box.newest.step) == (3, 4)


def test_the_next_attempt_knows_what_the_last_one_with_a_step_reached(
    inbox: tuple[ProgressInbox, Sender, io.StringIO],
) -> None:
    box, sender, _ = inbox
    box.expect(1)
    sender.step(1, 31)
    box.drain()
    box.expect(2)  # makes no step
    box.expect(3)
    sender.step(3, 30)
    assert box.drain() and box.newest and (box.newest.step, box.newest.previous_step) == (30, 31)


def test_nonsense_is_logged_once_and_changes_nothing(inbox: tuple[ProgressInbox, Sender, io.StringIO]) -> None:
    box, sender, output = inbox
    box.expect(1)
    sender.step(1, 5)
    for data in (b"", b"{", b"[]", b'{"attempt": 1}', b"\xff"):
        sender.raw(data)
    assert box.drain() and box.newest and box.newest.step == 5
    assert output.getvalue().count("progress_malformed") == 1
