"""The story of `make demo`: a job trains unhurt, the same job is hurt three times, both end with the same losses."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from llmtrain_kind.driver import REPOSITORY, Driver, DriverError, StepLine, read_steps
from llmtrain_kind.stage import Phases, stage, why_no_cluster

EXAMPLE = REPOSITORY / "examples" / "demo.yaml"
REPORT = REPOSITORY / "build" / "demo.json"
NAMESPACE = "demo"
CLUSTER = "demo"
STEPS_BETWEEN_FAULTS = 8
"""A fault is dealt only after this many new steps, so that each meets a job at work."""


@dataclass(frozen=True)
class FaultReport:
    """What one fault cost."""

    fault: str
    seconds_to_next_step: float
    steps_repeated: int


def manifest(name: str) -> dict[str, Any]:
    """Return the example's manifest under another name, with a checkpoint folder of its own."""
    job: dict[str, Any] = YAML(typ="safe").load(EXAMPLE.read_text())
    job["metadata"] = {"name": name, "namespace": NAMESPACE}
    job["spec"]["checkpoint"]["store"] = f"pvc://checkpoints/{name}"
    return job


def cost_of(fault: str, moment: float, before: StepLine, after: StepLine) -> FaultReport:
    """Work out what a fault cost from the last step before it and the first one after."""
    repeated = max(0, before.step - after.step + 1) if after.attempt > before.attempt else 0
    return FaultReport(fault, after.time - moment, repeated)


def first_step_after(lines: list[StepLine], moment: float, newer_attempt_than: int | None) -> StepLine | None:
    """Return the first step that ended after `moment`, of a newer attempt where one is asked for."""
    for line in lines:
        if line.time > moment and (newer_attempt_than is None or line.attempt > newer_attempt_than):
            return line
    return None


def compare(reference: list[StepLine], hurt: list[StepLine], steps: int) -> list[str]:
    """Return every difference between two runs' losses, bit for bit, also of repeated steps."""
    wanted = {line.step: line.loss for line in reference}
    problems = [f"step {step}: never done" for step in range(1, steps + 1) if step not in {line.step for line in hurt}]
    problems += [
        f"step {line.step} of attempt {line.attempt}: loss {line.loss.hex()} instead of {wanted[line.step].hex()}"
        for line in hurt
        if line.step not in wanted or wanted[line.step] != line.loss
    ]
    return problems


class Story:
    """Runs jobs on a cluster and hurts one of them."""

    def __init__(self, driver: Driver, folder: Path) -> None:
        self.driver = driver
        self.folder = folder

    def start(self, name: str) -> float:
        """Apply the job and wait for its first optimizer step; return the seconds from apply to that step."""
        applied = time.time()
        self.driver.apply(manifest(name))
        store = self.folder / name
        first = self.driver.wait(f"the first step of {name}", lambda: self._steps_or_failure(name, store), 180, 0.05)
        return float(first[0].time - applied)

    def finish(self, name: str) -> list[StepLine]:
        """Wait until the job succeeded; return its steps."""
        self.driver.wait(f"{name} to succeed", lambda: self._succeeded(name), 600, 0.5)
        return read_steps(self.folder / name)

    def hurt(self, name: str, fault: str) -> FaultReport:
        """Let the job make some steps, deal it one fault and wait for its next step."""
        store = self.folder / name
        begin = read_steps(store)[-1].step
        self.driver.wait("steps before the fault", lambda: read_steps(store)[-1].step >= begin + STEPS_BETWEEN_FAULTS)
        pods = self.driver.workers(NAMESPACE, name)
        if fault == "rank killed (-9)":
            moment = self.driver.kill_rank(NAMESPACE, pods[1], 3)
        elif fault == "pod force-deleted":
            moment = self.driver.delete_pod(NAMESPACE, pods[1])
        else:
            moment = self.driver.delete_operator()
        before = [line for line in read_steps(store) if line.time <= moment][-1]
        newer = None if fault.startswith("operator") else before.attempt
        after = self.driver.wait(
            f"a step after: {fault}", lambda: first_step_after(read_steps(store), moment, newer), 120, 0.05
        )
        attempts = [line for line in read_steps(store) if line.attempt == before.attempt]
        return cost_of(fault, moment, attempts[-1] if newer is not None else before, after)

    def _steps_or_failure(self, name: str, store: Path) -> list[StepLine]:
        steps = read_steps(store)
        if not steps:
            self._state(name)
        return steps

    def _succeeded(self, name: str) -> bool:
        return self._state(name) == "Succeeded"

    def _state(self, name: str) -> str:
        """Return the job's state; one that it will not leave by itself ends the story."""
        status = self.driver.job(NAMESPACE, name).get("status", {})
        state = str(status.get("state", ""))
        if state in ("Failed", "Blocked"):
            raise DriverError(f"{name} is {state}: {status.get('message')}")
        return state


FAULTS = ("rank killed (-9)", "pod force-deleted", "operator pod deleted")


def play(driver: Driver, phases: Phases) -> dict[str, Any]:
    """Run both jobs; return the facts that go to build/demo.json."""
    folder = driver.prepare_namespace(NAMESPACE)
    story = Story(driver, folder)
    with phases.phase("an unhurt job, for reference"):
        to_first_step = story.start("unhurt")
        reference = story.finish("unhurt")
    reports = []
    with phases.phase("the same job, hurt three times"):
        story.start("hurt")
        for fault in FAULTS:
            report = story.hurt("hurt", fault)
            print(f"    {fault}: next step after {report.seconds_to_next_step:.2f} s", flush=True)
            reports.append(report)
        hurt = story.finish("hurt")
    job = driver.job(NAMESPACE, "hurt")
    steps = int(job["spec"]["training"]["steps"])
    differences = compare(reference, hurt, steps) + compare(reference, reference, steps)
    return {
        "state": job["status"]["state"],
        "steps": steps,
        "applyToFirstStepSeconds": to_first_step,
        "faults": [asdict(report) for report in reports],
        "lossesEqualToTheLastBit": not differences,
        "differences": differences[:20],
        "finalLoss": reference[-1].loss.hex(),
        "statusFailures": job["status"].get("failures", []),
        "phases": [{"name": name, "seconds": seconds} for name, seconds in phases.taken],
    }


def print_table(facts: dict[str, Any]) -> None:
    """Print the end of the story."""
    print(f"\n{'fault':<24}{'seconds to next step':>22}{'steps repeated':>16}")
    for fault in facts["faults"]:
        print(f"{fault['fault']:<24}{fault['seconds_to_next_step']:>22.2f}{fault['steps_repeated']:>16}")
    same = "equal to the last bit" if facts["lossesEqualToTheLastBit"] else "DIFFERENT"
    print(f"\nstate {facts['state']}; losses of all {facts['steps']} steps {same} to the unhurt run's", flush=True)


def main() -> int:
    """Play the story on a cluster, or with processes where this machine cannot hold one; 0 where all of it held."""
    try:
        return _play_and_report()
    except DriverError as error:
        print(f"make demo: {error}", file=sys.stderr)
        return 1


def _play_and_report() -> int:
    started = time.monotonic()
    phases = Phases()
    REPORT.parent.mkdir(exist_ok=True)
    reason = "LLMTRAIN_DEMO=local asks for none" if os.environ.get("LLMTRAIN_DEMO") == "local" else why_no_cluster()
    if reason:
        print(f"no cluster on this machine: {reason}\nThe same story follows with processes in place of pods.")
        from llmtrain_kind.demo_local import play_local

        facts = play_local(phases)
    else:
        facts = _play_on_cluster(phases)
    facts["seconds"] = time.monotonic() - started
    REPORT.write_text(json.dumps(facts, indent=2) + "\n")
    print_table(facts)
    print(f"facts: {REPORT.relative_to(REPOSITORY)}; {facts['seconds']:.0f} s in all")
    return 0 if facts["lossesEqualToTheLastBit"] and facts["state"] == "Succeeded" else 1


def _play_on_cluster(phases: Phases) -> dict[str, Any]:
    with stage(CLUSTER, phases, keep=bool(os.environ.get("KEEP"))) as driver:
        return play(driver, phases)


if __name__ == "__main__":
    sys.exit(main())
