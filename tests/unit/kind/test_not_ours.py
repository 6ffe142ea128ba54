"""The cluster tool clears up after itself, and only after itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmtrain_kind import provider_kind, settings
from llmtrain_kind.errors import Refused
from llmtrain_kind.local import host_changes, sweep
from llmtrain_kind.provider_kind import KindProvider
from llmtrain_kind.provider_local import LocalProvider
from llmtrain_kind.settings import ClusterSettings

ASKED = ClusterSettings("demo", "kind", 3, "1.36.3")


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """State folders of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_a_kind_cluster_of_the_user_with_our_name_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # No Docker here: a program in kind's place that knows a cluster and writes down what it is asked.
    program, calls = tmp_path / "kind", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n[ "$1" = get ] && printf "other\\ndemo\\n"\n')
    program.chmod(0o755)
    monkeypatch.setattr(provider_kind, "_kind", lambda: program)
    with pytest.raises(Refused, match="not ours"):
        KindProvider(ASKED).up(ASKED, recreate=False, lock=0)
    assert calls.read_text().splitlines() == ["get clusters"]
    assert settings.load("demo") is None


def test_a_failed_start_is_cleared_away_although_its_logs_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = replace(ASKED, provider="local", slot=3)
    settings.save(asked)
    (asked.state / "log").write_text("no folder: copying it fails")
    provider = LocalProvider(asked)
    swept: list[int] = []
    monkeypatch.setattr(sweep, "sweep", lambda cluster: swept.append(cluster.slot))
    assert provider._keep_logs() is None
    provider.down()
    assert swept == [3] and settings.load("demo") is None


def test_a_kill_while_the_hosts_state_is_written_down_leaves_no_half_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tmp_path / "private" / "folder"

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(host_changes.os, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            host_changes.remember([made])
    assert not made.exists()
    host_changes.undo_after_last()
    host_changes.remember([made])
    assert made.is_dir() and json.loads(host_changes._file().read_text())["folders"] == [str(made)]
