"""The chart grants what the operator uses (kube/permissions.py), where it uses it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from llmtrain_operator.kube.permissions import (
    FOR_OWNER_REFERENCES,
    IN_JOB_NAMESPACES,
    IN_OWN_NAMESPACE,
    ON_NODES,
    Permission,
)
from tests.chart.conftest import NAMESPACE, Render, one

Grant = tuple[str, str, str]


def _granted(role: dict[str, Any]) -> set[Grant]:
    return {
        (verb, group, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def _used(permissions: Iterable[Permission]) -> set[Grant]:
    return {(p.verb, p.group, p.resource) for p in permissions}


JOB_RIGHTS = _used([*IN_JOB_NAMESPACES, *FOR_OWNER_REFERENCES])


def test_all_namespaces_are_granted_by_one_cluster_role(render: Render) -> None:
    objects = render()
    assert _granted(one(objects, "ClusterRole", "llmtrain-jobs")) == JOB_RIGHTS | _used(ON_NODES)
    binding = one(objects, "ClusterRoleBinding")
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "llmtrain-jobs",
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "llmtrain", "namespace": NAMESPACE}]


def test_named_namespaces_are_granted_by_roles_in_them_and_nothing_cluster_wide(render: Render) -> None:
    objects = render('watch.namespaces=["a","b"]', "rbac.aggregate=false")
    assert [item for item in objects if item["kind"].startswith("ClusterRole")] == []
    roles = {
        o["metadata"]["namespace"]: o
        for o in objects
        if o["kind"] == "Role" and o["metadata"]["name"] == "llmtrain-jobs"
    }
    assert set(roles) == {"a", "b"}
    assert all(_granted(role) == JOB_RIGHTS for role in roles.values())
    bindings = [o for o in objects if o["kind"] == "RoleBinding" and o["metadata"]["name"] == "llmtrain-jobs"]
    assert {binding["metadata"]["namespace"] for binding in bindings} == {"a", "b"}
    assert all(binding["subjects"][0]["namespace"] == NAMESPACE for binding in bindings)


def test_the_lease_is_granted_by_name_in_the_operators_own_namespace(render: Render) -> None:
    role = one(render(), "Role", "llmtrain-lease")
    assert role["metadata"]["namespace"] == NAMESPACE
    assert _granted(role) == _used(IN_OWN_NAMESPACE)
    by_name = [rule for rule in role["rules"] if set(rule["verbs"]) - {"create"}]
    assert [rule.get("resourceNames") for rule in by_name] == [["llmtrain"]]


def test_no_right_is_a_wildcard_and_no_secret_is_read(render: Render) -> None:
    for role in (o for o in render() if o["kind"] in ("Role", "ClusterRole")):
        granted = _granted(role)
        assert not [grant for grant in granted if "*" in "".join(grant)], role["metadata"]["name"]
        assert not {("get", "", "secrets"), ("list", "", "secrets"), ("watch", "", "secrets")} & granted


@pytest.mark.parametrize(
    ("name", "verbs", "targets"),
    [
        ("llmtrain-view", {"get", "list", "watch"}, {"view", "edit", "admin"}),
        ("llmtrain-edit", {"create", "update", "patch", "delete", "deletecollection"}, {"edit", "admin"}),
    ],
)
def test_users_get_their_rights_by_aggregation(render: Render, name: str, verbs: set[str], targets: set[str]) -> None:
    role = one(render(), "ClusterRole", name)
    assert {verb for verb, _, _ in _granted(role)} == verbs
    labels = [label for label in role["metadata"]["labels"] if "aggregate-to-" in label]
    assert {label.rpartition("-")[2] for label in labels} == targets


def test_an_administrator_may_grant_instead(render: Render) -> None:
    assert [o for o in render("rbac.create=false") if "Role" in o["kind"]] == []
