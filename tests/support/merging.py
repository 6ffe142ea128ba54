"""How the fake API server merges what is applied and patched."""

from __future__ import annotations

import copy
from typing import Any

Object = dict[str, Any]


def merged(base: Object, patch: Object) -> Object:
    """Lay maps over maps; everything else is replaced, and null removes."""
    result = dict(base)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(result.get(name), dict):
            result[name] = merged(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
    return result


def minus(base: Object, before: Object, now: Object) -> Object:
    """Take away what was applied before and is not applied now."""
    left = dict(base)
    for name, value in before.items():
        if name not in now:
            left.pop(name, None)
        elif isinstance(value, dict) and isinstance(now[name], dict) and isinstance(left.get(name), dict):
            left[name] = minus(left[name], value, now[name])
    return left


def without(obj: Object, name: str) -> Object:
    return {key: copy.deepcopy(value) for key, value in obj.items() if key != name}
