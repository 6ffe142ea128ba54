"""Hypothesis strategies for anything that an operator may ever see, sense or nonsense."""

from __future__ import annotations

from hypothesis import strategies as st

from llmtrain_api.constants import Action, FailureClass, State
from llmtrain_api.status import (
    CheckpointStatus,
    FailureStatus,
    LLMTrainJobStatus,
    ProgressStatus,
    RestartsStatus,
    Shape,
)
from llmtrain_api.sync import Progress, RankError, RankReport
from llmtrain_api.sync_beat import PHASES, Beat, Own
from llmtrain_operator.core.names import worker_name
from llmtrain_operator.core.observed import AgentView, Observed, Worker
from llmtrain_operator.core.times import to_timestamp
from tests.support.jobs import NOW, make_job

SHAPES = (
    Shape(world_size=2, replicate=1, shard=2, zero_stage=1, pipeline_schedule="1F1B", recompute="none"),
    Shape(world_size=2, replicate=0, shard=0, zero_stage=9, recompute="sometimes"),
    Shape(world_size=4, replicate=1, shard=4, zero_stage=3),
)
attempts = st.integers(0, 4)
moments = st.one_of(
    st.sampled_from([NOW, NOW - 0.1, NOW - 5.0, NOW - 100.0, NOW - 4000.0, NOW + 3.0, NOW + 1e6, 0.0, -1.0]),
    st.floats(NOW - 1e4, NOW + 10),
)
timestamps = moments.map(to_timestamp)
numbers = st.one_of(st.integers(-3, 200), st.sampled_from([2**63, 2**70, -(2**70)]))
floats = st.floats(allow_nan=True, allow_infinity=True)
finite = st.floats(allow_nan=False, allow_infinity=False)
texts = st.one_of(st.just(""), st.text(max_size=30), st.just("x " * 2000))
exit_codes = st.sampled_from([None, 0, 1, 64, 75, 76, 77, 137, 143, 255])


@st.composite
def ranks(draw: st.DrawFn) -> RankReport:
    ended = draw(st.booleans())
    return RankReport(
        local_rank=draw(st.integers(0, 3)),
        global_rank=draw(st.one_of(st.integers(0, 7), st.just(2**31 - 1))),
        pid=1,
        state="exited" if ended else "running",
        exit_code=draw(exit_codes) if ended else None,
        signal=draw(st.sampled_from([None, 9, 11, 15, 64, 99])) if ended else None,
        by_agent=draw(st.booleans()),
        oom_killed=draw(st.integers(0, 9)) == 0,
        exited_at=draw(st.one_of(st.none(), moments, finite)) if ended else None,
        error=draw(st.one_of(st.none(), st.just(RankError(message="training.steps is 0: use 1 or more")))),
    )


@st.composite
def progresses(draw: st.DrawFn) -> Progress:
    return Progress(
        attempt=draw(attempts),
        step=draw(numbers),
        first_step=draw(numbers),
        first_step_at=draw(st.one_of(moments, finite)),
        steps=draw(numbers),
        tokens=draw(numbers),
        loss=draw(floats),
        tokens_per_second=draw(floats),
        step_at=draw(moments),
        checkpoint_step=draw(numbers),
        checkpoint_at=draw(st.one_of(st.none(), moments, finite)),
        skipped_checkpoints=draw(st.sampled_from(["", "step 30: checksum of a shard differs"])),
        failed_checkpoint=draw(st.sampled_from(["", "step 40 could not be saved: no room"])),
    )


@st.composite
def agents(draw: st.DrawFn) -> AgentView:
    return AgentView(
        agent_id="a",
        address=draw(st.sampled_from(["10.0.0.1", "10.0.0.2"])),
        last_seen=draw(moments),
        attempt=draw(attempts),
        stopping=draw(st.integers(0, 5)) == 0,
        ranks=tuple(draw(st.lists(ranks(), max_size=3))),
        progress=draw(st.one_of(st.none(), progresses())),
        beats=tuple(draw(st.lists(beats(), max_size=3))),
        reported_at=draw(moments),
    )


@st.composite
def beats(draw: st.DrawFn) -> Beat:
    return Beat(
        global_rank=draw(st.one_of(st.integers(0, 7), st.just(2**31 - 1))),
        phase=draw(st.sampled_from([*PHASES, "", "a phase of a newer trainer"])),
        step=draw(numbers),
        seconds=draw(finite),
        limit_seconds=draw(st.one_of(st.none(), st.just(1.0), finite)),
        own=draw(st.one_of(st.none(), owns())),
        process_state=draw(st.sampled_from(["", "S", "D", "T", "?"])),
        probed=draw(st.booleans()),
        stack=draw(st.sampled_from(["", "no frame", 'File "torch/distributed/x.py", line 1 in wait'])),
    )


@st.composite
def owns(draw: st.DrawFn) -> Own:
    return Own(
        stage=draw(st.integers(0, 1)),
        loading_seconds=draw(finite),
        compute_seconds=draw(finite),
        device_seconds=draw(finite),
        step_seconds=draw(finite),
        span_seconds=draw(st.sampled_from([0.0, 30.0])),
    )


@st.composite
def workers(draw: st.DrawFn) -> Worker:
    index, created = draw(st.integers(0, 3)), draw(attempts)
    name = worker_name("demo", index, created)
    return Worker(
        name=name,
        uid=f"uid-{name}",
        index=index,
        created_attempt=created,
        replicas=draw(st.sampled_from([2, 2, 2, 3])),
        phase=draw(st.sampled_from(["Pending", "Running", "Running", "Running", "Succeeded", "Failed", "Unknown"])),
        created_at=draw(moments),
        deleting=draw(st.integers(0, 4)) == 0,
        waiting_reason=draw(st.sampled_from(["", "", "ErrImagePull", "InvalidImageName", "PodInitializing"])),
        waiting_message=draw(texts),
        waiting_since=draw(st.one_of(st.none(), moments)),
        unschedulable_message=draw(texts),
        exit_code=draw(exit_codes),
        oom_killed=draw(st.integers(0, 9)) == 0,
        disruption=draw(st.sampled_from(["", "", "PreemptionByScheduler", "DeletionByTaintManager"])),
        node=draw(st.sampled_from(["", "node-1", "node-2"])),
        avoids=draw(st.sampled_from([(), (), ("node-1",), ("node-2", "node-3")])),
        node_lost=draw(st.sampled_from(["", "", "", "the node does not exist any more"])),
        hardware=draw(st.sampled_from(["", "", "GpuXidError: Xid 79"])),
        broken_device=draw(st.sampled_from(["", "", "", "nvidia.com/gpu GPU-7 is unhealthy"])),
        agent=draw(st.one_of(st.none(), agents())),
    )


@st.composite
def failures(draw: st.DrawFn) -> FailureStatus:
    index, created = draw(st.integers(0, 3)), draw(attempts)
    return FailureStatus(
        at=draw(timestamps),
        attempt=draw(attempts),
        failure_class=draw(st.sampled_from(list(FailureClass))),
        worker=index,
        pod=draw(st.sampled_from(["", worker_name("demo", index, created)])),
        message="it broke",
        action=draw(st.sampled_from([action for action in Action if action is not Action.FAIL_JOB])),
        node=draw(st.sampled_from(["", "node-1", "node-2"])),
        step=draw(st.one_of(st.none(), st.integers(0, 100))),
        seconds_to_next_step=draw(st.sampled_from([None, "1.50"])),
    )


@st.composite
def statuses(draw: st.DrawFn) -> LLMTrainJobStatus:
    attempt = draw(attempts)
    counters = st.dictionaries(st.sampled_from([c.value for c in FailureClass]), st.integers(0, 8), max_size=3)
    progress = ProgressStatus(
        step=7, steps=100, tokens="7", loss="1", tokens_per_second="1", updated_at=draw(timestamps)
    )
    return LLMTrainJobStatus(
        state=draw(st.sampled_from([None, *State])),
        attempt=attempt,
        started_attempt=draw(st.integers(0, attempt)),
        attempt_started_at=draw(st.one_of(st.none(), st.just("yesterday"), timestamps)),
        start_time=draw(st.one_of(st.none(), timestamps)),
        completion_time=draw(st.one_of(st.none(), timestamps)),
        shape=draw(st.sampled_from([None, *SHAPES])),
        progress=draw(st.sampled_from([None, progress])),
        checkpoint=CheckpointStatus(last_good_step=draw(st.integers(-1, 50))),
        restarts=RestartsStatus(since_progress=draw(counters), by_worker_since_progress={"1": 1}),
        failures=draw(st.lists(failures(), max_size=16)),
        nodes_forgiven_at=draw(st.one_of(st.none(), timestamps)),
    )


@st.composite
def observations(draw: st.DrawFn) -> Observed:
    builder = make_job().with_status(draw(statuses()))
    builder.with_spec(suspend=draw(st.integers(0, 6)) == 0)
    if draw(st.integers(0, 3)) == 0:
        actions = st.sampled_from(["FailJob", "RestartRanks", "ReplaceWorker", "ReplaceNode", "Requeue", "Ignore"])
        classes = st.lists(st.sampled_from([c.value for c in FailureClass]), max_size=3, unique=True)
        rules = [{"onClasses": draw(classes), "action": draw(actions)} for _ in range(2)]
        builder.with_spec(failurePolicy={"rules": rules})
    if draw(st.booleans()):
        builder.with_spec(parallelism={"planFor": "cpu"})
    if draw(st.booleans()):
        builder.with_spec(activeDeadlineSeconds=600, ttlSecondsAfterFinished=0)
    if draw(st.integers(0, 9)) == 0:
        builder.with_metadata(deletionTimestamp=to_timestamp(NOW))
    found = draw(st.lists(workers(), max_size=6, unique_by=lambda worker: worker.name))
    return Observed(
        job=builder.build(),
        now=NOW,
        workers=tuple(found),
        spec_errors=draw(st.sampled_from([(), (), (), ("spec.training.steps is 0",)])),
        store_owner=draw(st.sampled_from(["", "", "", "lab/older"])),
        heard_at=draw(st.sampled_from([None, NOW, NOW - 1000])),
        observing_since=draw(st.sampled_from([None, NOW - 1000, NOW - 1])),
    )
