"""The layout that ranks get where the job leaves it to the planner: chosen once, kept as long as there are as many."""

from __future__ import annotations

from dataclasses import replace

from llmtrain_api.planning.decision import NoLayoutError, decided
from llmtrain_api.spec import LLMTrainJobSpec, Parallelism
from llmtrain_api.status import Shape
from llmtrain_operator.core.observed import Observed


def with_layout(observed: Observed) -> Observed:
    """Return the snapshot with a spec that leaves nothing to the planner, or with the reason why there is none.

    A shape in the status stands: a planner that has learned better since (a newer operator) restarts nobody.
    """
    job, spec = observed.job, observed.job.spec
    if spec.parallelism.plan_for is None or observed.spec_errors:
        return observed
    kept = _kept(job.status.shape, spec)
    try:
        spec = spec.model_copy(update={"parallelism": kept}) if kept else decided(spec)
    except NoLayoutError as error:
        return replace(observed, spec_errors=(str(error),))
    return replace(observed, job=job.model_copy(update={"spec": spec}))


def _kept(shape: Shape | None, spec: LLMTrainJobSpec) -> Parallelism | None:
    same_ranks = shape is not None and shape.world_size == spec.world_size()
    return shape.parallelism() if shape and same_ranks else None
