"""Locks whose file may be deleted by the holder."""

from __future__ import annotations

import threading
from pathlib import Path

from llmtrain_kind.locks import locked


def test_two_never_hold_one_lock_though_its_file_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holders: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with locked(path):
                holders.append(1)
                most.append(len(holders))
                holders.pop()
                path.unlink()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 80
    assert set(most) == {1}
