"""Which job owns a checkpoint store: one folder belongs to one job, or two runs would overwrite each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmtrain_api.constants import TERMINAL_STATES
from llmtrain_api.uris import Uri


def store_owner(manifest: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> str:
    """Return namespace/name of the job that owns the store of `manifest`, or '' where that is this job itself.

    Of the jobs in one namespace the older owns the store (creation time, then name) until it has finished or is gone.
    """
    store = _store(manifest)
    rank = _age(manifest)
    owners = [
        other
        for other in others
        if _metadata(other, "namespace") == _metadata(manifest, "namespace")
        and _metadata(other, "uid") != _metadata(manifest, "uid")
        and not is_finished(other)
        and _age(other) < rank
        and _store(other) == store
    ]
    if not owners or store is None:
        return ""
    owner = min(owners, key=_age)
    return f"{_metadata(owner, 'namespace')}/{_metadata(owner, 'name')}"


def is_finished(manifest: Mapping[str, Any]) -> bool:
    """Say whether the job's status tells a terminal state."""
    status = manifest.get("status")
    return isinstance(status, Mapping) and status.get("state") in TERMINAL_STATES


def _store(manifest: Mapping[str, Any]) -> Uri | None:
    """Return the store in a form in which two spellings of one folder are equal; None where it cannot be read."""
    try:
        uri = Uri.parse(manifest["spec"]["checkpoint"]["store"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return Uri(uri.scheme, uri.claim, "/".join(part for part in uri.path.split("/") if part not in ("", ".")))


def _age(manifest: Mapping[str, Any]) -> tuple[str, str]:
    return _metadata(manifest, "creationTimestamp"), _metadata(manifest, "name")


def _metadata(manifest: Mapping[str, Any], name: str) -> str:
    return str(manifest["metadata"].get(name) or "")
