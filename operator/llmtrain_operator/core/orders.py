"""What every agent is told. Orders are recomputed whole: an agent that missed one gets the same one again."""

from __future__ import annotations

from llmtrain_api.status import LLMTrainJobStatus
from llmtrain_api.sync import Assignment, Order
from llmtrain_operator.core.gang import Gang, is_connected, is_finished, is_leaving, may_run_ranks_before
from llmtrain_operator.core.hang import suspected
from llmtrain_operator.core.names import run_id
from llmtrain_operator.core.observed import Observed


def is_complete(observed: Observed, gang: Gang) -> bool:
    """Tell whether every index has a worker whose agent will get the order to start."""
    return all(slot.wanted and is_connected(slot.wanted, observed) for slot in gang.slots)


def leavers_may_write(status: LLMTrainJobStatus, gang: Gang) -> bool:
    """Tell whether a worker that is ending may still write a checkpoint as a rank of an older attempt."""
    return any(w.deleting and may_run_ranks_before(status.attempt, w) for w in gang.leftovers)


def old_ranks_may_run(observed: Observed, status: LLMTrainJobStatus) -> bool:
    """Tell whether ranks of an older attempt may still be busy with their last checkpoint anywhere."""
    return any(may_run_ranks_before(status.attempt, worker) for worker in observed.workers)


def gang_orders(observed: Observed, status: LLMTrainJobStatus, gang: Gang, grace_seconds: float) -> dict[str, Order]:
    """Return the order of every worker that can still listen, by worker name.

    `run` needs the address of worker 0. Where it is not known (an operator that has just restarted), the order is
    `wait` for the same attempt, which ends no rank of that attempt and starts none.
    """
    stop_seconds = float(observed.job.spec.failure_policy.deadlines.stop_seconds)
    orders = {}
    for worker in observed.workers:
        if not is_finished(worker):
            grace = stop_seconds if is_leaving(worker) else grace_seconds
            orders[worker.name] = Order(kind="wait", attempt=status.attempt, grace_seconds=grace)
    addresses = [slot.wanted.agent.address for slot in gang.slots if slot.wanted and slot.wanted.agent]
    if status.started_attempt == status.attempt and len(addresses) == len(gang.slots):
        probe = suspected(status, gang)
        common = _assignment(observed, status, addresses[0])
        for worker in gang.wanted():
            assignment = common.model_copy(update={"node_rank": worker.index})
            orders[worker.name] = Order(kind="run", attempt=status.attempt, assignment=assignment, probe=probe)
    return orders


def exit_orders(observed: Observed, exit_code: int) -> dict[str, Order]:
    """Return the order to end all ranks and leave, for every worker that can still listen."""
    attempt = observed.job.status.attempt
    return {
        w.name: Order(kind="exit", attempt=attempt, exit_code=exit_code) for w in observed.workers if not is_finished(w)
    }


def stop_orders(observed: Observed, attempt: int) -> dict[str, Order]:
    """Return the order to checkpoint and wait, for every worker that can still listen."""
    grace = float(observed.job.spec.failure_policy.deadlines.stop_seconds)
    return {
        w.name: Order(kind="wait", attempt=attempt, grace_seconds=grace) for w in observed.workers if not is_finished(w)
    }


def _assignment(observed: Observed, status: LLMTrainJobStatus, master_address: str) -> Assignment:
    """The assignment of worker 0; the others' differ in the node rank alone. The spec is dumped once for all."""
    spec, policy = observed.job.spec, observed.policy
    return Assignment(
        attempt=status.attempt,
        node_rank=0,
        num_nodes=spec.workers.replicas,
        ranks_per_worker=spec.ranks_per_worker(),
        master_address=master_address,
        master_port=policy.rendezvous_port_base + status.attempt % policy.rendezvous_port_span,
        run_id=run_id(observed.job),
        spec=spec.to_wire(),
    )
