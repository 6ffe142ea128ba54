"""hack/test: its closing lines and exit codes, in a small repository of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PASSES = "def test_one():\n    pass\n"
FAILS = "def test_one():\n    assert 1 == 2\n"
SKIPS = "import pytest\n\ndef test_one():\n    pytest.skip('no such thing here')\n\ndef test_two():\n    pass\n"
NEEDS_CLUSTER = "import pytest\n\n@pytest.mark.cluster\ndef test_one():\n    pass\n"

CAN_RUN = "#!/bin/sh\nexit 0\n"
CANNOT_RUN = "#!/bin/sh\necho 'neither Docker nor root: cannot make network namespaces' >&2\nexit 3\n"
BROKEN = "#!/bin/sh\necho 'Traceback: something else' >&2\nexit 1\n"

GREEN = {"unit": PASSES, "distributed": PASSES, "integration": PASSES, "chart": PASSES, "e2e": NEEDS_CLUSTER}


def make_repository(folder: Path, suites: dict[str, str], cluster_check: str) -> None:
    """Lay out the least that hack/test looks at: itself, .venv, kind/cluster and the suites."""
    (folder / "hack").mkdir()
    (folder / "hack" / "test").write_text((ROOT / "hack" / "test").read_text())
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "kind").mkdir()
    program = folder / "kind" / "cluster"
    if cluster_check:
        program.write_text(cluster_check)
        program.chmod(0o755)
    (folder / "kind" / "prepare").write_text("")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cluster: x\n    soak: x\n")
    for name, source in suites.items():
        (folder / "tests" / name).mkdir(parents=True)
        (folder / "tests" / name / f"test_{name}.py").write_text(source)


def run_hack_test(folder: Path, *arguments: str, ci: bool = False) -> tuple[int, list[str]]:
    """Return the exit code and the lines of the summary."""
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # start pytest in a fifth of the time
    if ci:
        environment["CI"] = "true"
    done = subprocess.run(
        [sys.executable, str(folder / "hack" / "test"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    _, _, summary = done.stdout.partition("=== summary ===\n")
    return done.returncode, summary.splitlines() or done.stderr.splitlines()


@dataclass(frozen=True)
class Case:
    """A repository, what is asked of it, and the closing lines that must come out."""

    arguments: str
    suites: dict[str, str]
    last_line: str
    holds: str
    code: int = 0
    check: str = CAN_RUN
    ci: bool = False


CASES = {
    "every-suite-runs-and-passes": Case("", GREEN, "passed", "e2e          passed", ci=True),
    "no-cluster-is-named-in-the-last-lines": Case(
        "e2e",
        GREEN,
        "passed, except for what could not run (above)",
        "NOT RUN: e2e: tests marked cluster: neither Docker nor root: cannot make network namespaces",
        check=CANNOT_RUN,
    ),
    "no-cluster-fails-in-ci": Case(
        "e2e",
        GREEN,
        "FAILED: CI=true, and the tests named above could not run",
        "e2e          NOT RUN",
        code=1,
        check=CANNOT_RUN,
        ci=True,
    ),
    "a-failure-stops-no-later-suite": Case(
        "unit chart", GREEN | {"unit": FAILS}, "FAILED: unit", "chart        passed", code=1
    ),
    "a-missing-suite-is-a-failure": Case("chart", {}, "FAILED: chart", "tests/chart does not exist", code=1),
    "a-suite-without-tests-is-a-failure": Case(
        "chart", {"chart": "x = 1\n"}, "FAILED: chart", "no tests were collected", code=1
    ),
    "skips-are-named-with-their-reason": Case("unit", {"unit": SKIPS}, "passed", "no such thing here"),
    "a-missing-cluster-tool-does-not-hide-the-suite": Case("e2e", GREEN, "passed", "e2e          passed", check=""),
    "a-broken-cluster-tool-does-not-hide-the-suite": Case("e2e", GREEN, "passed", "e2e          passed", check=BROKEN),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_summary(tmp_path, case):
    make_repository(tmp_path, case.suites, case.check)
    code, summary = run_hack_test(tmp_path, *case.arguments.split(), ci=case.ci)
    assert (code, summary[-1]) == (case.code, case.last_line), summary
    assert any(case.holds in line for line in summary), summary


def test_only_the_named_suite_runs_and_arguments_reach_pytest(tmp_path):
    make_repository(tmp_path, GREEN | {"unit": PASSES + "\n" + FAILS.replace("one", "two")}, CANNOT_RUN)
    code, summary = run_hack_test(tmp_path, "unit", "--", "-k", "one", ci=True)
    assert (code, summary[-1], len(summary)) == (0, "passed", 2)


def test_an_unknown_suite_is_named_with_the_allowed_ones(tmp_path):
    make_repository(tmp_path, GREEN, CAN_RUN)
    code, lines = run_hack_test(tmp_path, "unti")
    assert code == 2
    assert "'unti'" in lines[0]
    assert "unit, distributed, integration, chart, e2e, soak" in lines[0]


PREPARES = """
import os, pathlib, time
pathlib.Path("prepared.tmp").write_text(f"{os.getpid()} {os.nice(0)}")
os.rename("prepared.tmp", "prepared")
time.sleep(600)
"""

WAITS_FOR_PREPARATION = """
import pathlib, time

def test_one():
    deadline = time.monotonic() + 60
    while not pathlib.Path("prepared").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""


def test_the_cluster_is_prepared_beside_the_first_suites_and_nothing_is_left_of_it(tmp_path):
    make_repository(tmp_path, GREEN | {"unit": WAITS_FOR_PREPARATION}, CAN_RUN)
    (tmp_path / "kind" / "prepare").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{PREPARES}")
    code, summary = run_hack_test(tmp_path, "unit", "e2e", ci=True)
    assert (code, summary[-1]) == (0, "passed"), summary
    pid, niceness = (tmp_path / "prepared").read_text().split()
    assert niceness == "19"
    assert not Path(f"/proc/{pid}").exists()
