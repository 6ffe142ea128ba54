"""A report with an overdue beat, and the one in which it is not any more, are news to the operator."""

from __future__ import annotations

import asyncio

from llmtrain_api.sync import Order, SyncRequest
from llmtrain_api.sync_beat import Beat
from llmtrain_operator.coordinator.hub import Hub
from llmtrain_operator.runtime.backend import JobKey


def report(sequence: int, seconds: float) -> SyncRequest:
    beat = Beat(global_rank=0, phase="forward", step=3, seconds=seconds, limit_seconds=10.0)
    return SyncRequest(job_uid="u", agent_id="a", sequence=sequence, address="x", attempt=1, beats=[beat])


def test_overdue_beats_are_news_and_healthy_ones_are_not() -> None:
    async def play() -> list[int]:
        news: list[JobKey] = []
        now = 100.0
        hub = Hub(news.append, clock=lambda: now, hold_seconds=0.0)
        key = JobKey("lab", "demo")
        hub.admit(key, "u", ["w"])
        hub.publish("u", {"w": Order(kind="wait", attempt=1)})
        counts = []
        for sequence, seconds in enumerate([1.0, 2.0, 11.0, 12.0, 0.5, 1.0]):
            now += 1.0
            await hub.sync(key, "w", report(sequence, seconds))
            counts.append(len(news))
        view = hub.agents("u")["w"]
        assert view.reported_at == now and view.beats[0].seconds == 1.0
        return counts

    assert asyncio.run(play()) == [1, 1, 2, 3, 4, 4]
