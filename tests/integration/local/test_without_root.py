"""A run needs no root: the same restart, the same bits, as a user without rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.local.conftest import Losses, Start
from tests.integration.local.harness import ONE, bits

NOBODY = 65534
READING = ("dac_read_search", "dac_override")
"""Where Python lies in a folder of root's (as it may on a developer's machine), one right to look into it remains."""
PROBE = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", "import torch, llmtrain_trainer"]).returncode)
"""


def as_nobody() -> tuple[str, ...]:
    """Return a command prefix that changes to a user without rights; empty where we are one already."""
    if os.getuid() != 0:
        return ()
    plain = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    none = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    tries = [[*plain, *none]]
    for capability in READING:
        flags = [f"--{kind}=-all,+{capability}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
        tries.append([*plain, *flags])
    said = ""
    for prefix in tries:
        done = subprocess.run([*prefix, sys.executable, "-c", PROBE], capture_output=True, check=False)
        if done.returncode == 0:
            return tuple(prefix)
        said = done.stderr.decode()
    raise AssertionError(f"another user cannot run {sys.executable}: {said}")


@pytest.fixture
def folder_of_nobody() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="llmtrain-test-"))
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(600)
def test_a_killed_rank_without_root(new_run: Start, folder_of_nobody: Path, reference_of_one: Losses) -> None:
    run = new_run(**ONE, folder=folder_of_nobody, prefix=as_nobody())
    run.start()
    run.wait_for_step(8)
    assert {process.uids().effective for process in run.processes()} <= {os.getuid() or NOBODY}
    run.kill_rank(1)
    run.wait_for_step(6, attempt=2)
    run.succeed()
    assert bits(run.steps()) == reference_of_one
    run.assert_nothing_runs()


def test_a_state_folder_that_cannot_be_written(new_run: Start, folder_of_nobody: Path, tmp_path: Path) -> None:
    run = new_run(**ONE, folder=folder_of_nobody, prefix=as_nobody())
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    run.state = locked / "state"
    run.start()
    code, output = run.finish()
    assert code == 2
    assert f"--state {run.state}" in output
    assert "use a folder that you can write" in output
