"""The operator's settings: flags, variables, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtrain_operator.runtime.settings import SettingsError, parse_settings

URL = "--coordinator-url=http://llmtrain.llmtrain-system:8470/"


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    environment = {
        "LLMTRAIN_OPERATOR_KEY_FILE": "/keys/a",
        "LLMTRAIN_OPERATOR_WORKERS": "3",
        "LLMTRAIN_OPERATOR_METRICS_PORT": "9000",
        "LLMTRAIN_OPERATOR_NAMESPACES": "b, a,,a",
        "POD_NAME": "operator-7",
        "POD_NAMESPACE": "system",
    }
    settings = parse_settings([URL, "--workers=5", "--settle-seconds=0.2"], environment)
    assert settings.coordinator_url == "http://llmtrain.llmtrain-system:8470"
    assert (settings.key_file, settings.workers, settings.metrics_port) == (Path("/keys/a"), 5, 9000)
    assert settings.namespaces == ("a", "b")
    assert (settings.identity, settings.lease_namespace) == ("operator-7", "system")
    assert (settings.policy.settle_seconds, settings.policy.status_period_seconds) == (0.2, 30.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--coordinator-url"),
        ([URL], "--key-file"),
        (["--coordinator-url=llmtrain:8470", "--key-file=k"], "llmtrain:8470"),
        ([URL, "--key-file=k", "--workers=0"], "--workers"),
        ([URL, "--key-file=k", "--workers=many"], "many"),
        ([URL, "--key-file=k", "--log-format=xml"], "xml"),
        ([URL, "--key-file=k", "--nonsense"], "--nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_is_missing_or_impossible_is_named(arguments: list[str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        parse_settings(arguments, {})


@pytest.mark.parametrize(("variable", "value"), [("LOG_LEVEL", "LOUD"), ("LOG_FORMAT", "xml"), ("WORKERS", "many")])
def test_a_variable_is_checked_as_its_flag_is(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=value):
        parse_settings([URL, "--key-file=k"], {f"LLMTRAIN_OPERATOR_{variable}": value})


@pytest.mark.parametrize("content", [None, b"short"], ids=["no file", "too short"])
def test_a_bad_key_is_refused_before_anything_starts(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"--key-file.*Fix:"):
        parse_settings([URL, f"--key-file={file}"], {}).key()
