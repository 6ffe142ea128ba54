"""Slots: every cluster of a machine has its own, and nobody takes what others hold."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from llmtrain_kind import slots
from llmtrain_kind.errors import CannotRunHere
from llmtrain_kind.folders import cache_folder, clusters_folder


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A registry of the test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def all_free(_: int) -> bool:
    return True


def test_clusters_get_different_slots_and_keep_them() -> None:
    assert [slots.take(name, all_free) for name in ("a", "b", "a")] == [0, 1, 0]
    assert slots.names() == ["a", "b"]


def test_a_slot_given_back_is_the_next_to_be_taken() -> None:
    for name in ("a", "b", "c"):
        slots.take(name, all_free)
    slots.give_back("b")
    slots.give_back("b")
    assert slots.take("d", all_free) == 1


def test_a_slot_in_use_by_another_state_folder_is_left_alone() -> None:
    assert slots.take("a", lambda slot: slot not in (0, 1)) == 2


def test_a_cluster_keeps_its_slot_though_the_machine_shows_it_in_use() -> None:
    slots.take("a", all_free)
    assert slots.take("a", lambda slot: False) == 0


def test_no_slot_left_is_said_with_the_names_of_those_who_have_them() -> None:
    for slot in slots.SLOTS:
        slots.take(f"c{slot}", all_free)
    with pytest.raises(CannotRunHere, match=r"all 16 .*c0.*c9"):
        slots.take("late", all_free)
    assert "late" not in slots.names()


def test_many_at_once_get_different_slots() -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda number: slots.take(f"c{number}", all_free), range(16)))
    assert sorted(taken) == list(range(16))


def test_the_registry_is_a_plain_file_below_the_state_folder(own_state: Path) -> None:
    slots.take("a", all_free)
    assert json.loads((own_state / "llmtrain" / "clusters" / ".slots.json").read_text()) == {"a": 0}


@pytest.mark.parametrize(
    ("value", "expected"),
    [pytest.param("relative/path", "home", id="relative is invalid by XDG"), pytest.param("", "home", id="empty")],
)
def test_an_unusable_xdg_folder_falls_back_to_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / expected))
    monkeypatch.setenv("XDG_STATE_HOME", value)
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert clusters_folder() == tmp_path / expected / ".local/state/llmtrain/clusters"
    assert cache_folder() == tmp_path / expected / ".cache/llmtrain"
