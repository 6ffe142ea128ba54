"""The OOM counter is found under cgroup v1 and v2, inside and outside a container, and each kill counts once."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain_trainer.agent.oom import OomWatch

V1 = "5:cpu,cpuacct:/pod/box\n4:memory:/pod/box\n0::/\n"
V2 = "0::/pod/box\n"


def host(root: Path, cgroup: str, file: str, count: int) -> Path:
    """Lay out the files that the kernel would show; return the counter."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    counter = root / "sys/fs/cgroup" / file
    counter.parent.mkdir(parents=True, exist_ok=True)
    show(counter, count)
    return counter


def show(counter: Path, count: int) -> None:
    first = "oom_kill_disable 0\nunder_oom 0\n" if counter.name == "memory.oom_control" else "low 0\noom 9\n"
    counter.write_text(f"{first}oom_kill {count}\noom_group_kill 7\n")


@pytest.mark.parametrize(
    ("cgroup", "file"),
    [
        pytest.param(V1, "memory/pod/box/memory.oom_control", id="v1 seen from the host"),
        pytest.param(V1, "memory/memory.oom_control", id="v1 in a container"),
        pytest.param(V2, "pod/box/memory.events", id="v2 seen from the host"),
        pytest.param(V2, "memory.events", id="v2 in a container without its namespace"),
        pytest.param("0::/\n", "memory.events", id="v2 in a container"),
    ],
)
def test_every_kill_is_taken_once(tmp_path: Path, cgroup: str, file: str) -> None:
    counter = host(tmp_path, cgroup, file, 3)
    watch = OomWatch(tmp_path)
    assert not watch.take()  # what happened before us
    show(counter, 5)
    assert [watch.take() for _ in range(3)] == [True, True, False]
    show(counter, 6)
    watch.start_afresh()
    assert not watch.take()


def test_host_without_a_counter_reports_no_kill(tmp_path: Path) -> None:
    assert not OomWatch(tmp_path).take()
    counter = host(tmp_path, V2, "memory.events", 0)
    watch = OomWatch(tmp_path)
    counter.unlink()
    assert not watch.take()
