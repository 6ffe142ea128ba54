"""For each alert: series on which it fires, and series just short of that, as promtool writes them (30 s a sample)."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain_operator.runtime.metrics import RECOVERY_BUCKETS

Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    """What differs from a healthy operator; two hours of samples. None in `bad`: the series is absent."""

    alert: str
    bad: dict[str, str | None]
    near: Series


def _after(value: str) -> str:
    """An hour of nothing, then an hour of `value`."""
    return f"0x120 {value}x120"


OK = 'llmtrain_api_requests_total{verb="patch",resource="pods",code="200"}'
API = 'llmtrain_api_requests_total{{verb="patch",resource="pods",code="{}"}}'
HEALTHY: Series = {
    "llmtrain_leader": "1x240",
    "llmtrain_watching": "1x240",
    "llmtrain_watch_age_seconds": "0+30x10 300x230",
    "llmtrain_agents_connected": "64x240",
    'llmtrain_reconciles_total{result="ok"}': "0+10x240",
    OK: "0+100x240",
    'llmtrain_failures_total{class="Crash",action="RestartRanks"}': "0x120 1x120",
    'llmtrain_jobs_ended_total{state="Succeeded"}': "0x120 1x120",
    'llmtrain_recovery_seconds_bucket{class="Crash",le="5.0"}': "0x120 1x120",
    'llmtrain_longest_wait_seconds{state="Pending"}': "0+30x20 0x220",
}


def _storm(in_ten_minutes: int) -> Series:
    return {'llmtrain_failures_total{class="NodeLost",action="ReplaceWorker"}': f"0+{in_ten_minutes / 20}x240"}


def _recoveries(count: int, bucket: str) -> Series:
    """`count` recoveries in the second hour, each in the bucket that ends at `bucket` seconds."""
    bounds = [*map(str, RECOVERY_BUCKETS), "+Inf"]
    name = "llmtrain_recovery_seconds"
    reached = bounds[bounds.index(bucket) :]
    steps = f"0x118 0+{count / 40}x40 {count}x80"
    series = {f'{name}_bucket{{class="NodeLost",le="{bound}"}}': steps for bound in reached}
    return {**series, f'{name}_count{{class="NodeLost"}}': steps}


CASES = (
    Case("LLMTrainOperatorDown", {"llmtrain_build_info": None}, {}),
    Case("LLMTrainNoLeader", {"llmtrain_leader": _after("0")}, {"llmtrain_leader": "1x234 0x5"}),
    Case("LLMTrainTwoLeaders", {"llmtrain_leader": _after("2")}, {"llmtrain_leader": "1x236 2x3"}),
    Case("LLMTrainWatchDead", {"llmtrain_watching": _after("0")}, {"llmtrain_watching": "1x236 0x3"}),
    Case(
        "LLMTrainWatchStale",
        {"llmtrain_watch_age_seconds": "0+30x240"},
        {"llmtrain_watch_age_seconds": "899x240"},
    ),
    Case(
        "LLMTrainReconcileFailing",
        {'llmtrain_reconciles_total{result="retry"}': "0+0.5x240"},
        {'llmtrain_reconciles_total{result="error"}': "0+0.3x240"},
    ),
    Case(
        "LLMTrainQueueSlow",
        {"llmtrain_queue_oldest_seconds": _after("31")},
        {"llmtrain_queue_oldest_seconds": "0x232 90x7"},
    ),
    Case("LLMTrainApiThrottled", {API.format(429): "0+6x240"}, {API.format(429): "0+5x240"}),
    Case("LLMTrainApiFailing", {API.format(0): "0+3x240", API.format(503): "0+3x240"}, {API.format(409): "0+50x240"}),
    Case(
        "LLMTrainTokensRefused",
        {'llmtrain_sync_refusals_total{code="403"}': "0+2x240"},
        {'llmtrain_sync_refusals_total{code="404"}': "0+50x240", 'llmtrain_sync_refusals_total{code="403"}': "0+1x240"},
    ),
    Case("LLMTrainAgentsSilent", {"llmtrain_agents_silent": _after("1")}, {"llmtrain_agents_silent": "0x232 1x7"}),
    Case(
        "LLMTrainJobPending",
        {'llmtrain_longest_wait_seconds{state="Pending"}': "0+30x240"},
        {'llmtrain_longest_wait_seconds{state="Pending"}': "1790x240"},
    ),
    Case(
        "LLMTrainJobBlocked",
        {'llmtrain_longest_wait_seconds{state="Blocked"}': "0+30x240"},
        {'llmtrain_longest_wait_seconds{state="Blocked"}': "890x240"},
    ),
    Case(
        "LLMTrainUnreadableJobs",
        {"llmtrain_unreadable_jobs_total": "0+0.1x240"},
        {"llmtrain_unreadable_jobs_total": "3x240"},
    ),
    Case(
        "LLMTrainJobNotProgressing",
        {"llmtrain_longest_without_step_seconds": "0+30x240"},
        {"llmtrain_longest_without_step_seconds": "1790x240"},
    ),
    Case("LLMTrainRestartStorm", dict(_storm(30)), _storm(15)),
    Case(
        "LLMTrainJobFailed",
        {'llmtrain_jobs_ended_total{state="Failed"}': "0x230 1x10"},
        {'llmtrain_jobs_ended_total{state="Failed"}': "7x240"},
    ),
    Case("LLMTrainRecoverySlow", dict(_recoveries(10, "600.0")), _recoveries(10, "120.0")),
    Case(
        "LLMTrainGoodputLow",
        {"llmtrain_lowest_goodput_ratio": "1x120 0.49x120"},
        {"llmtrain_lowest_goodput_ratio": "0.51x180 0.49x59"},
    ),
    Case(
        "LLMTrainCheckpointsFailing",
        {"llmtrain_jobs_with_failing_checkpoints": _after("1")},
        {"llmtrain_jobs_with_failing_checkpoints": "0x222 1x17"},
    ),
    Case(
        "LLMTrainCheckpointOld",
        {"llmtrain_oldest_checkpoint_seconds": "7000+30x240"},
        {"llmtrain_oldest_checkpoint_seconds": "7190x240"},
    ),
)
