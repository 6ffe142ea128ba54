"""How fast training goes on after a fault: us beside torchrun (elastic), same image, trainer and cluster, one run.

    .venv/bin/python -m benchmarks.recovery [--cluster NAME] [--rounds 5]

Both train the `tiny` model on 2 pods x 2 ranks with a checkpoint every 10 steps. A rank is killed (-9), a pod is
deleted (--force, so that the grace period of either system plays no part), and each is started from nothing; the figure
is the time to the end of the next optimizer step, as the trainer writes it. Medians over the rounds, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import torchrun
from llmtrain_kind.driver import REPOSITORY, Driver, StepLine, read_steps
from llmtrain_kind.stage import Phases, stage
from tests.e2e.jobs import CLAIM, small_job

NAMESPACE = "bench"
REPORT = REPOSITORY / "build" / "recovery.json"
ENDLESS = 1_000_000


class Ours:
    """An LLMTrainJob."""

    name = "llmtrain"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def start(self) -> None:
        self.driver.apply(small_job(NAMESPACE, self.name, training__steps=ENDLESS))

    def stop(self) -> None:
        self.driver.kubectl("delete", "ltj", self.name, "-n", NAMESPACE, "--wait=true")
        wait_no_pods(self.driver, f"llmtrain.dev/job={self.name}")

    def pod(self, index: int) -> str:
        return self.driver.workers(NAMESPACE, self.name)[index]


class Torchrun:
    """A StatefulSet of torchrun agents."""

    name = "torchrun"

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def start(self) -> None:
        spec = small_job(NAMESPACE, self.name, training__steps=ENDLESS)["spec"]
        self.driver.apply(*torchrun.objects(NAMESPACE, spec, CLAIM))

    def stop(self) -> None:
        self.driver.kubectl("delete", f"statefulset/{self.name}", f"service/{self.name}", "-n", NAMESPACE)
        wait_no_pods(self.driver, f"app={self.name}")

    def pod(self, index: int) -> str:
        return f"{self.name}-{index}"


System = Ours | Torchrun


def wait_no_pods(driver: Driver, selector: str) -> None:
    def gone() -> bool:
        return not driver.kubectl("get", "pods", "-n", NAMESPACE, "-l", selector, "-o", "name").strip()

    driver.wait("pods to go", gone, 180, 0.5)


def wait_more_steps(driver: Driver, store: Path, count: int) -> None:
    """Let training make some steps, so that a fault meets it at work and a checkpoint lies behind it."""
    begin = len(read_steps(store))
    driver.wait("more steps", lambda: len(read_steps(store)) >= begin + count, 300, 0.2)


def measure_fault(driver: Driver, system: System, store: Path, deal: Callable[[], float]) -> float:
    """Deal a fault; return seconds until a step of another attempt has ended."""
    wait_more_steps(driver, store, 25)
    moment = deal()
    attempt = read_steps(store)[-1].attempt

    def next_step() -> StepLine | None:
        return next((line for line in read_steps(store) if line.time > moment and line.attempt != attempt), None)

    found: StepLine = driver.wait(f"{system.name}: a step after the fault", next_step, 300, 0.05)
    return found.time - moment


def measure_start(driver: Driver, system: System, store: Path) -> float:
    """Start the system from nothing; return seconds from apply to its first step of a fresh store."""
    if store.exists():
        store.rename(store.with_name(f"{store.name}-{time.time_ns()}"))
    begin = time.time()
    system.start()
    driver.wait(f"{system.name}: the first step", lambda: read_steps(store), 300, 0.05)
    return read_steps(store)[0].time - begin


def run_rounds(driver: Driver, systems: list[System], folder: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return system to measure to its figures. One system at a time is alive, so that they do not slow each other."""
    figures: dict[str, dict[str, list[float]]] = {
        system.name: {"start": [], "rank": [], "pod": []} for system in systems
    }
    for turn in range(rounds):
        for system in systems:
            store = folder / system.name
            kill = lambda system=system: driver.kill_rank(NAMESPACE, system.pod(1), 3)  # noqa: E731
            delete = lambda system=system: driver.delete_pod(NAMESPACE, system.pod(1))  # noqa: E731
            row = figures[system.name]
            row["start"].append(measure_start(driver, system, store))
            row["rank"].append(measure_fault(driver, system, store, kill))
            row["pod"].append(measure_fault(driver, system, store, delete))
            system.stop()
            print(
                f"round {turn + 1} {system.name}: " + ", ".join(f"{k} {v[-1]:.2f} s" for k, v in row.items()),
                flush=True,
            )
    return figures


def report(figures: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Print the table; return the facts."""
    titles = {"start": "apply -> first step", "rank": "rank kill -9 -> next step", "pod": "pod delete -> next step"}
    facts: dict[str, Any] = {"figures": figures, "medians": {}, "load": os.getloadavg()}
    print(f"\n{'median seconds':<28}{'llmtrain':>10}{'torchrun':>10}{'ratio':>8}")
    for key, title in titles.items():
        ours = statistics.median(figures["llmtrain"][key])
        theirs = statistics.median(figures["torchrun"][key])
        facts["medians"][key] = {"llmtrain": ours, "torchrun": theirs, "ratio": ours / theirs}
        print(f"{title:<28}{ours:>10.2f}{theirs:>10.2f}{ours / theirs:>8.2f}")
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="bench", help="name of the test cluster; started if need be")
    parser.add_argument("--keep", action="store_true", help="leave the cluster running")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with stage(options.cluster, Phases(), keep=options.keep) as driver:
        folder = driver.prepare_namespace(NAMESPACE)
        facts = report(run_rounds(driver, [Ours(driver), Torchrun(driver)], folder, options.rounds))
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"facts: {REPORT.relative_to(REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
