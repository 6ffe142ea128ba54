"""Objects of one kind as this process knows them: fed by watches, lists, and the answers to our own writes.

The newest resourceVersion wins, so a late watch event never takes back what a write's answer has shown already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Object = dict[str, Any]
Changed = Callable[[Object], None]
MAX_TOMBSTONES = 20_000
_KEPT_OUT = frozenset({"managedFields"})


class ObjectCache:
    """Objects by namespace and name. All methods belong to one event loop."""

    def __init__(self, on_change: Changed, group_by: Callable[[Object], str] | None = None) -> None:
        """`on_change` gets each object that changed or went; `group_by` makes `group` quick."""
        self._on_change = on_change
        self._group_by = group_by
        self._objects: dict[tuple[str, str], Object] = {}
        self._groups: dict[str, dict[tuple[str, str], Object]] = {}
        self._tombstones: OrderedDict[str, None] = OrderedDict()
        """Uids that are gone: an old event or list must not bring them back."""

    def __len__(self) -> int:
        return len(self._objects)

    def __iter__(self) -> Iterator[Object]:
        return iter(list(self._objects.values()))

    def get(self, namespace: str, name: str) -> Object | None:
        """Return the newest known state."""
        return self._objects.get((namespace, name))

    def group(self, value: str) -> list[Object]:
        """Return the objects whose `group_by` is this value."""
        return list(self._groups.get(value, {}).values())

    def put(self, obj: Object) -> bool:
        """Take in a state of an object; return False where a newer one is known."""
        uid, key = _uid(obj), _key(obj)
        known = self._objects.get(key)
        if uid in self._tombstones:
            return False
        if known is not None and not _is_newer(obj, known):
            return False
        obj = _pruned(obj)
        if known is not None:
            self._remove(key)
        self._objects[key] = obj
        if self._group_by is not None:
            self._groups.setdefault(self._group_by(obj), {})[key] = obj
        self._on_change(obj)
        return True

    def gone(self, obj: Object) -> None:
        """Take note that the object with this uid does not exist any more."""
        uid, key = _uid(obj), _key(obj)
        self._tombstones[uid] = None
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        known = self._objects.get(key)
        if known is not None and _uid(known) == uid:
            self._remove(key)
            self._on_change(known)

    def replace(self, objects: Iterable[Object], list_version: str, namespace: str | None) -> int:
        """Take in a complete list (of all namespaces with None); what it lacks and is not newer than it is gone.

        Returns how many objects were not known as listed.
        """
        objects = list(objects)
        listed = {_uid(obj) for obj in objects}
        repaired = sum(self.put(obj) for obj in objects)
        limit = _number(list_version)
        for obj in self:
            if namespace is not None and obj["metadata"].get("namespace") != namespace:
                continue
            version = _number(obj["metadata"].get("resourceVersion"))
            if _uid(obj) not in listed and limit is not None and version is not None and version <= limit:
                self.gone(obj)
                repaired += 1
        return repaired

    def _remove(self, key: tuple[str, str]) -> None:
        obj = self._objects.pop(key)
        if self._group_by is not None:
            value = self._group_by(obj)
            self._groups[value].pop(key, None)
            if not self._groups[value]:
                del self._groups[value]


def _pruned(obj: Mapping[str, Any]) -> Object:
    """Drop what nobody reads and what takes most of the memory."""
    metadata = {name: value for name, value in obj["metadata"].items() if name not in _KEPT_OUT}
    return {**obj, "metadata": metadata}


def _is_newer(obj: Object, known: Object) -> bool:
    """Compare versions as numbers (Kubernetes promises since 1.35 that they are); else believe the later one."""
    ours, theirs = (_number(o["metadata"].get("resourceVersion")) for o in (obj, known))
    return ours is None or theirs is None or ours > theirs


def _number(version: Any) -> int | None:
    return int(version) if isinstance(version, str) and version.isdecimal() else None


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def _uid(obj: Object) -> str:
    return str(obj["metadata"].get("uid", ""))
