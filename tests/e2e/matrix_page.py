"""Writes docs/reference/fault_matrix.md from the fault table and the figures that the e2e suite measured.

    make test SUITE=e2e ARGS="-k fault_matrix"    measures, into build/fault-matrix/
    .venv/bin/python -m tests.e2e.matrix_page     writes the page

Figures differ from run to run, so the page is committed and not compared; a unit test holds its rows to the table.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from llmtrain_kind.driver import REPOSITORY
from tests.e2e.faults import LADDER, NODES, Fault
from tests.e2e.recorder import Cost, costs

PAGE = REPOSITORY / "docs" / "reference" / "fault_matrix.md"


@dataclass(frozen=True)
class Elsewhere:
    """A fault that another test deals, one that needs no recovery to be timed."""

    id: str
    outcome: str
    tests: tuple[str, ...]
    """`file::name`, as pytest takes them."""


_REFUSED = "tests/e2e/test_refusals.py::test_a_user_error_fails_the_job_with_a_message"
_MATRIX = "tests/e2e/test_fault_matrix.py"
_API = "tests/integration/operator/test_faults.py"
ELSEWHERE: tuple[Elsewhere, ...] = (
    Elsewhere(
        "program refuses its input (exit 64)",
        "`UserError`, `FailJob`: the job fails at once, with the program's words",
        (f"{_MATRIX}::test_a_program_that_refuses_its_input_is_not_restarted", _REFUSED),
    ),
    Elsewhere(
        "image missing, pod unschedulable, data missing",
        "the job waits until a deadline that names the cause, or fails at once where waiting cannot help",
        (
            _REFUSED,
            "tests/unit/operator/core/test_deadlines.py"
            "::test_a_worker_pending_too_long_is_replaced_and_the_message_says_why",
        ),
    ),
    Elsewhere(
        "namespace deleted while the job trains",
        "everything goes, nothing keeps the namespace",
        (f"{_MATRIX}::test_a_namespace_can_be_deleted_while_its_job_trains",),
    ),
    Elsewhere(
        "job deleted while the operator is down",
        "all of its pods go",
        ("tests/e2e/test_survival.py::test_deleting_the_job_with_the_operator_down_removes_everything",),
    ),
    Elsewhere(
        "kills of ranks, pods and the operator at twenty random moments",
        "the losses are those of an unhurt run",
        ("tests/e2e/test_survival.py::test_twenty_kills_at_random_moments_end_with_the_same_loss_bits",),
    ),
    Elsewhere(
        "API server away",
        "training goes on; the status catches up",
        (
            "tests/e2e/test_survival.py::test_training_goes_on_while_the_api_server_is_away",
            f"{_API}::test_an_outage_of_the_api_server_changes_nothing_and_the_status_catches_up",
        ),
    ),
    Elsewhere(
        "operator killed at each write of a reconcile",
        "the next operator goes on from the status",
        (
            "tests/integration/operator/test_operator.py::test_an_operator_killed_at_any_moment_loses_nothing",
            f"{_API}::test_killed_between_status_and_pods_the_next_operator_goes_on_from_the_status",
        ),
    ),
    Elsewhere(
        "reads and writes refused (409, 410, 429, 500) or lost",
        "pods are made once, and the operator comes up",
        (
            f"{_API}::test_a_job_gets_its_pods_once_whatever_write_fails",
            f"{_API}::test_an_operator_comes_up_whatever_read_fails_and_sees_jobs_that_come_later",
        ),
    ),
    Elsewhere(
        "slow worker (a quota of 15 % of one CPU)",
        "condition `Straggling` names it, in 24 s when last measured; with `action: ReplaceNode` it moves to another "
        "node, no step lost",
        ("tests/e2e/test_stragglers.py::test_a_throttled_worker_is_named_and_moves_to_another_node_with_no_step_lost",),
    ),
    Elsewhere(
        "checkpoint store full",
        "training goes on; saving is tried again, and an event tells it",
        ("tests/distributed/test_full_disk.py::test_training_goes_on_and_saves_again_when_there_is_room",),
    ),
    Elsewhere(
        "loss or gradient not finite, or far out of its history",
        "all ranks skip the step alike",
        (
            "tests/distributed/test_skipping.py::test_skipped_steps_change_nothing_and_are_the_same_after_a_resume",
            "tests/distributed/test_skipping.py::test_spikes_are_the_same_for_one_process_and_for_four",
        ),
    ),
)
NOT_YET = (
    "a non-finite loss that comes back at the same step (steps are skipped; the job does not go back further)",
    "a cut-off worker that goes on writing, on the cluster (its claim is fenced in the store: with processes that is "
    "shown by `tests/distributed/test_fencing.py`)",
)

_HEAD = """# Fault matrix

What is done to a job of two workers with two ranks each, on a cluster of three real nodes (containerd, kubelet, the
API server and etcd, without Docker; [kind/](../../kind/README.md)), and what the operator makes of it. Written by
`python -m tests.e2e.matrix_page` from the figures of one run of `tests/e2e/test_fault_matrix.py`.

- **Detection**: from the fault to the status that tells of the next attempt.
- **Recovery**: from the fault to the first optimizer step of the next attempt.
- **Steps lost**: made, and made again. A checkpoint is committed every 5 steps.

After all of these, every loss of every step has the bits of a run that nothing happened to.

| fault | class | action | culprit | detection (s) | recovery (s) | steps lost |
|---|---|---|---|---|---|---|
"""


def _row(fault: Fault, cost: Cost) -> str:
    culprit = "-" if fault.worker is None else f"worker {fault.worker}"
    cells = (fault.id, f"`{fault.failure_class}`", f"`{fault.action}`", culprit)
    figures = (f"{cost.detection_seconds:.2f}", f"{cost.recovery_seconds:.2f}", str(cost.lost_steps))
    return f"| {' | '.join((*cells, *figures))} |\n"


def page(found: dict[str, Cost]) -> str:
    """Return the page's text.

    Raises:
        KeyError: a row of the table was not measured.
    """
    rows = "".join(_row(fault, found[fault.id]) for fault in (*LADDER, *NODES))
    others = "".join(
        f"| {row.id} | {row.outcome} | {'; '.join(f'`{test}`' for test in row.tests)} |\n" for row in ELSEWHERE
    )
    missing = "".join(f"- {text}\n" for text in NOT_YET)
    notes = (
        "\nA rank out of memory takes so long because it first has to fill its limit of 3 GiB; a hang is told by the "
        "learned\ntime of a step ([hangs](../concepts/hangs.md)); a lost node by its agent's silence of twelve "
        "seconds at the most.\n"
    )
    head = "\n## Shown elsewhere\n\n| fault | outcome | tests |\n|---|---|---|\n"
    return f"{_HEAD}{rows}{notes}{head}{others}\n## Not yet\n\n{missing}"


def main() -> int:
    """Write the page; return the exit code."""
    found = costs()
    missing = [fault.id for fault in (*LADDER, *NODES) if fault.id not in found]
    if missing:
        print(f"matrix_page: not measured: {', '.join(missing)}; run tests/e2e/test_fault_matrix.py", file=sys.stderr)
        return 1
    PAGE.write_text(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
