from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from llmtrain_trainer.metrics.lines import LineFile


def test_attempt_after_attempt_appends(tmp_path: Path) -> None:
    for text in ("one", "two"):
        file = LineFile(tmp_path / "m.jsonl")
        file.append(text)
        file.close()
    assert (tmp_path / "m.jsonl").read_text() == "one\ntwo\n"


def test_a_line_that_was_cut_by_a_kill_is_ended_first(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st')
    file = LineFile(tmp_path / "m.jsonl")
    file.append('{"step": 2}')
    file.close()
    assert (tmp_path / "m.jsonl").read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 2}']


def test_a_full_disk_costs_lines_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The limit on a file's size stands in for the disk: the kernel cuts the write short, then refuses."""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, resource.RLIM_INFINITY))
        file = LineFile(tmp_path / "m.jsonl")
        for _ in range(5):
            file.append("0123456789")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        file.append("after")
        os._exit(len(caplog.records))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert (tmp_path / "m.jsonl").read_text() == "0123456789\n0123456789\n012\nafter\n"
