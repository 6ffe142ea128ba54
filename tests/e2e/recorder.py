"""What a fault cost, as seen from outside: a job's states with the moment the API server showed them, and its steps."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmtrain_kind.driver import REPOSITORY, Driver

RESULTS = REPOSITORY / "build" / "fault-matrix"


@dataclass(frozen=True)
class Cost:
    """One row's figures."""

    id: str
    detection_seconds: float
    """From the fault to the status that tells of the next attempt."""
    recovery_seconds: float
    """From the fault to the first optimizer step of the next attempt."""
    lost_steps: int
    """Steps that were made and had to be made again."""

    def keep(self) -> None:
        """Write it where `python -m tests.e2e.matrix_page` finds it."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{self.id.replace(' ', '-')}.json").write_text(json.dumps(asdict(self)))
        print(json.dumps(asdict(self)))


class JobWatch:
    """Follows one job by a watch."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, dict[str, Any]]] = []

    @property
    def status(self) -> dict[str, Any]:
        """The newest one; empty before the first."""
        return self._seen[-1][1] if self._seen else {}

    def first(self, attempt: int) -> float | None:
        """Return when the status first showed this attempt or a later one: the operator had seen the fault by then."""
        return next((at for at, status in list(self._seen) if status.get("attempt", 0) >= attempt), None)

    def wait(self, driver: Driver, what: str, condition: Callable[[dict[str, Any]], Any], timeout: float) -> Any:
        """Wait until a status fulfils the condition and return its value.

        Raises:
            DriverError: none did in `timeout` seconds.
        """
        return driver.wait(what, lambda: condition(self.status), timeout, 0.05)

    def follow(self, lines: Iterator[str]) -> None:
        """Take in a watch's output: JSON objects, one after the other, over many lines."""
        text: list[str] = []
        for line in lines:
            text.append(line)
            if line.rstrip() == "}":
                self._seen.append((time.time(), json.loads("".join(text)).get("status", {})))
                text.clear()


@contextmanager
def watched(driver: Driver, namespace: str, name: str) -> Iterator[JobWatch]:
    """Watch a job for the length of a block."""
    command = driver.command("get", "ltj", name, "-n", namespace, "-o", "json", "--watch")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    watch = JobWatch()
    thread = threading.Thread(target=watch.follow, args=(process.stdout,), daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        process.terminate()
        process.wait()
        thread.join()


def costs(folder: Path = RESULTS) -> dict[str, Cost]:
    """Return the figures of the newest runs, by row."""
    found = [Cost(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return {cost.id: cost for cost in found}
