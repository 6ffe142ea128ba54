"""The alert rules, judged by the real promtool on series made of the operator's own exposition, and by the docs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from llmtrain_api.constants import State
from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_kind import programs
from llmtrain_operator.runtime.backend import JobKey
from llmtrain_operator.runtime.job_metrics import JobGauges
from llmtrain_operator.runtime.metrics import Metrics
from tests.chart.alert_cases import CASES, HEALTHY, Case
from tests.chart.conftest import CHART, Render, one

ROOT = CHART.parents[1]
RULES = CHART / "rules" / "alerts.yaml"
RUNBOOKS = ROOT / "docs" / "runbooks"
REFERENCE = ROOT / "docs" / "reference" / "metrics.md"
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
SECTIONS = ("What it means", "What it costs", "First three commands", "Causes, likeliest first", "Fix", "Silence")
TARGET = 'namespace="llmtrain-system",job="llmtrain",pod="llmtrain-0",instance="10.0.0.1:8080"'
END = "119m"

# On a new machine the first of these tests builds promtool, where kind/prepare has not come to it yet.
pytestmark = pytest.mark.timeout(1200)


def _exposition() -> str:
    """What a fresh operator shows that was told to name jobs and has one."""
    jobs = JobGauges(each_job=True, clock=lambda: 1_800_000_000.0)
    status = LLMTrainJobStatus.model_validate(
        {
            "state": State.TRAINING,
            "progress": {
                **{"step": 7, "steps": 9, "tokens": "70", "loss": "1.5", "tokensPerSecond": "12.5"},
                "updatedAt": "2027-01-15T07:59:00Z",
            },
        }
    )
    jobs.take(JobKey("lab", "demo"), status)
    return Metrics(jobs).exposition().decode()


def _families() -> set[str]:
    return {line.split()[2] for line in _exposition().splitlines() if line.startswith("# TYPE")}


def _samples() -> dict[str, str]:
    """Every series of the exposition, named as promtool wants it, with constant values."""
    found = {}
    for line in _exposition().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = f"{float(value):g}x240"
    return found


def _parsed(series: str) -> tuple[str, frozenset[tuple[str, str]]]:
    sample = next(iter(text_string_to_metric_families(f"{series} 1\n"))).samples[0]
    return sample.name, frozenset(sample.labels.items())


def _input(*layers: Mapping[str, str | None]) -> list[dict[str, str]]:
    merged: dict[tuple[str, frozenset[tuple[str, str]]], str | None] = {}
    for layer in layers:
        for series, values in layer.items():
            name, labels = _parsed(series)
            if values is None:
                merged = {known: old for known, old in merged.items() if known[0] != name}
            else:
                merged[name, labels] = values
    return [
        {"series": f"{name}{{{_with_target(labels)}}}", "values": values}
        for (name, labels), values in merged.items()
        if values is not None
    ]


def _with_target(labels: Iterable[tuple[str, str]]) -> str:
    """Labels as the rules see them: those of the metric, and those that a scrape adds."""
    return ",".join([*(f'{label}="{value}"' for label, value in sorted(labels)), TARGET])


@pytest.fixture(scope="session")
def promtool() -> Path:
    return programs.ensure(("promtool",)) / "promtool"


def _run(promtool: Path, *arguments: str, text: str = "") -> str:
    done = subprocess.run(
        [str(promtool), *arguments], input=text, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _judge(promtool: Path, folder: Path, series: list[dict[str, str]], firing: str) -> None:
    """Run promtool: at the end the named alert fires once and no other; none at all where the name is empty."""
    expected = [{"labels": f'{{alertname="{firing}"}}', "value": 1}] if firing else []
    check = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": END,
        "exp_samples": expected,
    }
    test = {"interval": "30s", "input_series": series, "promql_expr_test": [check]}
    content = {"rule_files": [str(RULES)], "evaluation_interval": "30s", "tests": [test]}
    (folder / "test.yaml").write_text(yaml.safe_dump(content))
    _run(promtool, "test", "rules", str(folder / "test.yaml"))


def test_promtool_finds_the_rules_sound(promtool: Path) -> None:
    assert f"{len(ALERTS)} rules found" in _run(promtool, "check", "rules", "--lint-fatal", str(RULES))


def test_promtool_finds_the_operators_metrics_sound(promtool: Path) -> None:
    assert _run(promtool, "check", "metrics", text=_exposition()) == ""


def test_a_healthy_operator_raises_no_alert(promtool: Path, tmp_path: Path) -> None:
    _judge(promtool, tmp_path, _input(_samples(), HEALTHY), "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_on_its_bad_series_and_no_other_does(promtool: Path, tmp_path: Path, case: Case) -> None:
    _judge(promtool, tmp_path, _input(_samples(), HEALTHY, case.bad), case.alert)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_is_silent_just_short_of_it(promtool: Path, tmp_path: Path, case: Case) -> None:
    _judge(promtool, tmp_path, _input(_samples(), HEALTHY, case.near), "")


def test_every_alert_has_its_cases_and_its_page() -> None:
    assert sorted(case.alert for case in CASES) == sorted(ALERTS)
    assert sorted(page.stem for page in RUNBOOKS.glob("*.md")) == sorted(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_all_that_who_is_woken_needs(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["for"]
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
    text = (RUNBOOKS / f"{name}.md").read_text()
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == list(SECTIONS)
    commands = text.split("## First three commands\n")[1].split("\n## ")[0]
    assert len(re.findall(r"^    \S", commands, re.MULTILINE)) == 3


def test_every_metric_in_the_rules_is_one_of_the_operator() -> None:
    names = {name.partition("{")[0] for name in _samples()} | {"llmtrain_api_requests_total"}
    for rule in ALERTS.values():
        used = set(re.findall(r"llmtrain_\w+", rule["expr"]))
        assert used and used <= names, rule["alert"]


def test_the_reference_tells_every_metric_and_no_other() -> None:
    told = set(re.findall(r"^\| `(llmtrain_\w+)", REFERENCE.read_text(), re.MULTILINE))
    assert told == _families()


def test_the_chart_hands_prometheus_the_tested_rules(render: Render) -> None:
    objects = render('metrics.prometheusRule={"enabled":true,"runbooks":"https://example.org/books/"}')
    groups = one(objects, "PrometheusRule")["spec"]["groups"]
    for group in groups:
        for rule in group["rules"]:
            url = rule["annotations"]["runbook_url"]
            assert url == f"https://example.org/books/{rule['alert']}.md"
            rule["annotations"]["runbook_url"] = f"docs/runbooks/{rule['alert']}.md"
    assert groups == GROUPS
    assert not [item for item in render() if item["kind"] == "PrometheusRule"]
