"""Folders of killed agents are removed, those of living ones and of other people are not."""

from __future__ import annotations

import os
from pathlib import Path

from llmtrain_trainer.agent.workdir import WorkDir


def test_only_folders_whose_agent_is_gone_are_removed(tmp_path: Path) -> None:
    (tmp_path / "agent-killed").mkdir()
    (tmp_path / "agent-killed/attempt-1").mkdir()
    (tmp_path / "agent-notes.txt").write_text("mine")
    (tmp_path / "precious").mkdir()
    first = WorkDir(tmp_path, "first")
    second = WorkDir(tmp_path, "second")
    assert sorted(os.listdir(tmp_path)) == ["agent-first", "agent-notes.txt", "agent-second", "precious"]
    second.remove()
    first.remove()
    assert sorted(os.listdir(tmp_path)) == ["agent-notes.txt", "precious"]


def test_folder_of_one_attempt_replaces_that_of_the_one_before(tmp_path: Path) -> None:
    folder = WorkDir(tmp_path, "a")
    folder.begin(1)
    folder.begin(2)
    assert os.listdir(folder.path) == ["attempt-2"]
    folder.remove()


def test_socket_of_a_deep_folder_goes_where_its_path_is_short_enough(tmp_path: Path) -> None:
    folder = WorkDir(tmp_path / ("d" * 120), "a")
    path = folder.socket_path()
    assert len(os.fsencode(path)) <= 107 and path.parent.is_dir()
    folder.remove()
    assert not path.parent.exists()
    shallow = WorkDir(Path("/tmp"), f"test-{os.getpid()}")
    assert shallow.socket_path().parent == shallow.path
    shallow.remove()
