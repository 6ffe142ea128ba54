"""Lay a user's part of a PodSpec over ours, as a strategic merge patch would: what the user writes wins.

It takes whatever is there and never fails: what makes no sense is left for the API server to refuse by its own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
}
"""Lists whose entries are merged by a key (the API's patchMergeKey); any other list is replaced as a whole."""

ONE_OF_LISTS = frozenset({"env", "volumes"})
"""Lists whose entries name one source of several: an entry of another source replaces ours."""


def overlay(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with `patch` laid over it; a field that is null in the patch is removed. Neither is changed."""
    merged = dict(base)
    for name, value in patch.items():
        old = merged.get(name)
        if value is None:
            merged.pop(name, None)
        elif isinstance(old, dict) and isinstance(value, dict):
            merged[name] = overlay(old, value)
        elif isinstance(old, list) and isinstance(value, list) and name in MERGE_KEYS:
            merged[name] = _merge_list(old, value, MERGE_KEYS[name], one_of=name in ONE_OF_LISTS)
        else:
            merged[name] = value
    return merged


def _merge_list(base: list[Any], patch: list[Any], key: str, one_of: bool) -> list[Any]:
    merged = list(base)
    for entry in patch:
        place = next((i for i, old in enumerate(merged) if _same(old, entry, key)), None)
        if place is None:
            merged.append(entry)
        elif one_of and not entry.keys() <= merged[place].keys():
            merged[place] = entry
        else:
            merged[place] = overlay(merged[place], entry)
    return merged


def _same(old: Any, new: Any, key: str) -> bool:
    return isinstance(old, dict) and isinstance(new, dict) and key in new and old.get(key) == new[key]


def keep_away(affinity: Any, nodes: Sequence[str]) -> dict[str, Any]:
    """Return the affinity of a pod with these nodes ruled out, beside whatever else it asks for.

    Node selector terms are alternatives, so each of them has to rule the nodes out.
    """
    given = _as_dict(affinity)
    of_nodes = _as_dict(given.get("nodeAffinity"))
    terms = _as_dict(of_nodes.get("requiredDuringSchedulingIgnoredDuringExecution")).get("nodeSelectorTerms")
    # The API server takes one value per requirement on a field of the node, unlike one on its labels.
    away = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    alternatives = [term for term in terms if isinstance(term, dict)] if isinstance(terms, list) else []
    # An empty term matches no node; left alone it would match all but these.
    kept = [{**term, "matchFields": [*(term.get("matchFields") or []), *away]} for term in alternatives if term]
    if not alternatives:
        kept = [{"matchFields": away}]
    selector = {"nodeSelectorTerms": kept or alternatives}
    return {**given, "nodeAffinity": {**of_nodes, "requiredDuringSchedulingIgnoredDuringExecution": selector}}


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
