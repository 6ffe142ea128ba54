"""What a rank leaves behind becomes a report within the protocol's bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmtrain_trainer.agent.gang import Gang, Rank, read_error
from llmtrain_trainer.agent.launch import RankStart


def test_rank_that_wrote_nothing_has_no_error(tmp_path: Path) -> None:
    assert read_error(tmp_path / "error.json") is None


def test_long_error_is_cut_where_it_says_least(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    record = {"message": "m" * 9000, "exception": "E" * 999, "traceback": "a" * 20000 + "end", "time": 5, "more": 1}
    file.write_text(json.dumps(record))
    error = read_error(file)
    assert error and (len(error.message), len(error.exception), len(error.traceback)) == (4096, 256, 16384)
    assert error.traceback.endswith("end") and error.time == 5


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"message": "half', id="cut off"),
        pytest.param(b"[1]", id="another shape"),
        pytest.param(b'{"exception": "X"}', id="without a message"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b" " * (2 << 20) + b"{}", id="endless"),
    ],
)
def test_error_file_that_is_none_is_told_as_such(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "error.json"
    file.write_bytes(content)
    error = read_error(file)
    assert error and str(file) in error.message and len(error.message) <= 4096


@pytest.mark.parametrize(
    ("status", "exit_code", "signal"),
    [
        pytest.param(0, 0, None, id="success"),
        pytest.param(64 << 8, 64, None, id="exit code"),
        pytest.param(9, None, 9, id="signal"),
        pytest.param(6 | 0x80, None, 6, id="signal with a core dump"),
    ],
)
def test_wait_status_is_told_as_code_or_signal(
    tmp_path: Path, status: int, exit_code: int | None, signal: int | None
) -> None:
    rank = Rank(1, 3, tmp_path / "none", pid=77)
    rank.ended(status, 12.5)
    report = rank.report()
    assert (report.exit_code, report.signal, report.state, report.exited_at) == (exit_code, signal, "exited", 12.5)


def test_ranks_that_could_not_start_are_failed_ones(tmp_path: Path) -> None:
    gang = Gang.stillborn(4, [RankStart(0, 2, {}, tmp_path), RankStart(1, 3, {}, tmp_path)], "no memory")
    assert not gang.running and not gang.succeeded
    assert [(r.report().global_rank, r.report().exit_code, r.error.message) for r in gang.ranks if r.error] == [
        (2, 1, "no memory"),
        (3, 1, "no memory"),
    ]
