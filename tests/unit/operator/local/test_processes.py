"""Who is an agent of this folder, and that nobody else is ever killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain_api.constants import Env
from llmtrain_operator.local import processes
from llmtrain_operator.local.processes import AGENT_MODULE, agents_below, kill_agents


@contextmanager
def sleeper(*arguments: str, work: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like an agent as far as its arguments and environment do."""
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={Env.WORK_DIR: str(work)})
    try:
        assert child.stdout
        child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()


def test_only_agents_of_the_folder_are_killed(tmp_path: Path) -> None:
    mine, similar = tmp_path / "workers", tmp_path / "workers-2"
    with (
        sleeper(AGENT_MODULE, work=mine / "w0" / "work") as agent,
        sleeper(AGENT_MODULE, work=mine / "w1" / "work") as spared,
        sleeper(AGENT_MODULE, work=similar / "w0" / "work") as neighbour,
        sleeper("another.module", work=mine / "w0" / "work") as other,
    ):
        assert sorted(agents_below(mine)) == sorted([agent.pid, spared.pid])
        assert kill_agents(mine, spare=frozenset({spared.pid})) == 1
        assert agent.wait(10) == -9
        assert [child.poll() for child in (spared, neighbour, other)] == [None, None, None]


def test_a_pid_that_another_process_got_meanwhile_is_not_killed(tmp_path: Path) -> None:
    with sleeper("another.module", work=tmp_path) as stranger:
        processes._kill(stranger.pid, processes.marker_of(tmp_path))
        assert stranger.poll() is None
