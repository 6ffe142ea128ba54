"""What a user asks of a cluster: checked, kept and compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain_kind import settings
from llmtrain_kind.errors import Refused
from llmtrain_kind.settings import ClusterSettings


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        pytest.param(settings.check_name, "Big", "a-z", id="capital letter"),
        pytest.param(settings.check_name, "../x", "a-z", id="path"),
        pytest.param(settings.check_name, "a" * 25, "1-24", id="name too long"),
        pytest.param(settings.check_name, "a-", "a-z", id="dash at the end"),
        pytest.param(settings.check_nodes, 0, "1 to 16", id="no nodes"),
        pytest.param(settings.check_nodes, 17, "1 to 16", id="too many nodes"),
        pytest.param(settings.check_version, "latest", "full version", id="no version"),
        pytest.param(settings.check_version, "2.1.0", "full version", id="another major version"),
        pytest.param(settings.parse_mount, "/a", "SRC:DST", id="mount without target"),
        pytest.param(settings.parse_mount, "a:/b", "absolute", id="relative source"),
        pytest.param(settings.parse_mount, "/:b", "absolute", id="relative target"),
        pytest.param(settings.parse_mount, "/does/not/exist:/b", "is not there", id="source is not there"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(
    check: Callable[..., object], value: object, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        check(value)


def test_good_values_pass_in_their_plain_form(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert settings.check_name("a1-b") == "a1-b"
    assert settings.check_version("v1.36.3") == "1.36.3"
    assert settings.parse_mount(f"{tmp_path}/link:/opt//x/") == (str(tmp_path / "real"), "/opt/x")


def test_settings_come_back_from_the_state_folder_as_they_were(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert settings.load("c") is None
    saved = ClusterSettings("c", "local", 3, "1.36.3", (("/a", "/b"),), slot=4)
    settings.save(saved)
    assert settings.load("c") == saved


@pytest.mark.parametrize(
    ("change", "same"),
    [
        pytest.param({"slot": 7}, True, id="slot is not asked for"),
        pytest.param({"nodes": 2}, False, id="nodes"),
        pytest.param({"kubernetes": "1.35.4"}, False, id="version"),
        pytest.param({"mounts": ()}, False, id="mounts"),
    ],
)
def test_up_compares_what_was_asked_for(change: dict[str, object], same: bool) -> None:
    first = ClusterSettings("c", "local", 3, "1.36.3", (("/a", "/b"),), slot=4)
    values = {**{name: getattr(first, name) for name in first.__dataclass_fields__}, **change}
    assert (ClusterSettings(**values).asked() == first.asked()) is same
