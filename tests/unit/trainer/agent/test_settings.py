"""The agent's environment: what is missing or wrong is named, all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain_api.constants import Env
from llmtrain_trainer.agent.settings import DEFAULT_RANK_ENTRY, RANK_ENTRY, Settings, SettingsError

GOOD = {
    Env.COORDINATOR_URL: "http://llmtrain.llmtrain-system:8470/",
    Env.TOKEN_FILE: "/var/run/llmtrain/token",
    Env.JOB_NAMESPACE: "team",
    Env.JOB_NAME: "job",
    Env.JOB_UID: "uid-1",
    Env.POD_NAME: "job-w0-a1",
    Env.POD_ADDRESS: "10.0.0.7",
    Env.WORKER_INDEX: "3",
}


def test_required_variables_are_enough_and_the_rest_has_defaults() -> None:
    settings = Settings.from_environment(GOOD)
    assert settings.coordinator_url == "http://llmtrain.llmtrain-system:8470"
    assert (settings.worker_index, settings.run_name) == (3, "team/job")
    assert (settings.grace_seconds, settings.orphan_seconds) == (30.0, 0.0)
    assert settings.work_dir == Path("/tmp/llmtrain")
    assert (dict(settings.volumes), settings.rank_entry) == ({}, DEFAULT_RANK_ENTRY)


def test_optional_variables_are_taken() -> None:
    own = {Env.GRACE_SECONDS: "12.5", Env.ORPHAN_SECONDS: "600", Env.WORK_DIR: "/w", Env.VOLUMES: '{"claim": "/data"}'}
    settings = Settings.from_environment({**GOOD, **own, RANK_ENTRY: "a.b:c"})
    assert (settings.grace_seconds, settings.orphan_seconds, settings.work_dir) == (12.5, 600.0, Path("/w"))
    assert (settings.volumes, settings.rank_entry) == ({"claim": "/data"}, "a.b:c")


@pytest.mark.parametrize("name", [pytest.param(name, id=name) for name in GOOD])
@pytest.mark.parametrize("value", [pytest.param(None, id="unset"), pytest.param("", id="empty")])
def test_required_variable_that_is_not_set_is_named(name: Env, value: str | None) -> None:
    environment = {key: text for key, text in GOOD.items() if key != name}
    if value is not None:
        environment[name] = value
    with pytest.raises(SettingsError, match=f"{name} is not set"):
        Settings.from_environment(environment)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(Env.COORDINATOR_URL, "llmtrain:8470", id="address without scheme"),
        pytest.param(Env.COORDINATOR_URL, "ftp://llmtrain", id="address of another scheme"),
        pytest.param(Env.COORDINATOR_URL, "http://", id="address without host"),
        pytest.param(Env.COORDINATOR_URL, "http://host:8470/?a=b", id="address with a query"),
        pytest.param(Env.COORDINATOR_URL, "http://host:99999", id="impossible port"),
        pytest.param(Env.WORKER_INDEX, "-1", id="negative index"),
        pytest.param(Env.WORKER_INDEX, "1.5", id="broken index"),
        pytest.param(Env.GRACE_SECONDS, "soon", id="grace in words"),
        pytest.param(Env.GRACE_SECONDS, "-1", id="negative grace"),
        pytest.param(Env.ORPHAN_SECONDS, "nan", id="no number"),
        pytest.param(Env.ORPHAN_SECONDS, "inf", id="endless"),
        pytest.param(Env.VOLUMES, "{", id="volumes that are no JSON"),
        pytest.param(Env.VOLUMES, '["a"]', id="volumes of another shape"),
        pytest.param(Env.VOLUMES, '{"claim": 1}', id="folder that is no text"),
        pytest.param(RANK_ENTRY, "module", id="entry without function"),
    ],
)
def test_wrong_value_is_shown_with_what_is_allowed(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({**GOOD, name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}: it must be ")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({**GOOD, Env.POD_NAME: "", Env.GRACE_SECONDS: "x", Env.WORKER_INDEX: "y"})
    assert len(str(caught.value).splitlines()) == 3
