"""The cache of objects: whatever order news come in, the newest version is what it shows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain_operator.kube.cache import ObjectCache

Object = dict[str, Any]


def _object(version: int, *, uid: str = "u1", name: str = "a", namespace: str = "lab", group: str = "g") -> Object:
    metadata = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": str(version)}
    return {"metadata": {**metadata, "managedFields": [{"big": True}]}, "group": group}


def _cache() -> tuple[ObjectCache, list[Object]]:
    changes: list[Object] = []
    return ObjectCache(changes.append, group_by=lambda obj: obj["group"]), changes


def _version(cache: ObjectCache) -> str | None:
    obj = cache.get("lab", "a")
    return obj["metadata"]["resourceVersion"] if obj else None


def test_a_late_watch_event_does_not_take_back_what_a_write_showed() -> None:
    cache, changes = _cache()
    assert cache.put(_object(9))
    assert not cache.put(_object(7))
    assert not cache.put(_object(9))
    assert _version(cache) == "9"
    assert len(changes) == 1


def test_what_nobody_reads_is_not_kept() -> None:
    cache, _ = _cache()
    cache.put(_object(1))
    assert "managedFields" not in cache.get("lab", "a")["metadata"]  # type: ignore[index]


def test_what_is_gone_never_comes_back_but_its_name_does() -> None:
    cache, changes = _cache()
    cache.put(_object(1))
    cache.gone(_object(5))
    assert not cache.put(_object(6))
    assert cache.get("lab", "a") is None
    assert len(cache) == 0 and cache.group("g") == []
    assert cache.put(_object(8, uid="u2"))
    cache.gone(_object(5))
    assert _version(cache) == "8"
    assert len(changes) == 3


@pytest.mark.parametrize(
    ("list_version", "namespace", "left"),
    [("5", None, {"listed", "younger"}), ("5", "lab", {"listed", "younger", "elsewhere"}), ("x", None, None)],
    ids=["all namespaces", "one namespace", "a version that is no number"],
)
def test_a_list_removes_what_it_lacks_unless_that_is_newer(
    list_version: str, namespace: str | None, left: set[str] | None
) -> None:
    cache, _ = _cache()
    known = {"listed": 2, "missing": 3, "younger": 6}
    for name, version in known.items():
        cache.put(_object(version, uid=name, name=name))
    cache.put(_object(3, uid="elsewhere", name="elsewhere", namespace="other"))
    repaired = cache.replace([_object(2, uid="listed", name="listed")], list_version, namespace)
    names = {obj["metadata"]["name"] for obj in cache}
    assert names == (left or {*known, "elsewhere"})
    assert repaired == 4 - len(names)


def test_an_object_that_changes_its_group_leaves_the_old_one() -> None:
    cache, _ = _cache()
    cache.put(_object(1, group="g"))
    cache.put(_object(2, group="h"))
    assert cache.group("g") == []
    assert len(cache.group("h")) == 1


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_in_any_order_of_events_the_cache_ends_where_the_server_is(data: st.DataObject) -> None:
    """History: lives of one name, each with some versions and an end. Every event comes at least once, in any order."""
    lives = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    last_lives = data.draw(st.booleans())
    version, events = 0, []
    for life, length in enumerate(lives):
        for _ in range(length):
            version += 1
            events.append(("PUT", _object(version, uid=f"u{life}")))
        if life < len(lives) - 1 or not last_lives:
            version += 1
            events.append(("GONE", _object(version, uid=f"u{life}")))
    cache, _ = _cache()
    order = [*data.draw(st.permutations(events)), *data.draw(st.lists(st.sampled_from(events), max_size=5))]
    for kind, obj in order:
        if kind == "PUT":
            cache.put(obj)
        else:
            cache.gone(obj)
    assert _version(cache) == (str(version) if last_lives else None)
