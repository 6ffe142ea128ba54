"""The work queue, in virtual time: no test here waits."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtrain_operator.runtime.workqueue import LAST_BACKOFF_SECONDS, RetryLaterError, WorkQueue


class _JumpingSelector(selectors.SelectSelector):
    """Where a real selector would wait for a timer, the clock jumps to it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def _run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)


async def _drain(queue: WorkQueue[str], handler: Any, seconds: float, workers: int = 2) -> None:
    """Run the queue for some virtual seconds."""
    asyncio.get_running_loop().call_later(seconds, queue.close)
    await queue.run(handler, workers)


def test_a_key_waits_once_however_often_it_is_added() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        seen: list[str] = []

        async def handler(key: str) -> None:
            seen.append(key)

        for key in "abaab":
            queue.add(key)
        assert queue.depth == 2
        await asyncio.sleep(0.01)
        assert queue.oldest_seconds >= 0.005
        await _drain(queue, handler, 1)
        assert seen == ["a", "b"]
        assert queue.oldest_seconds == 0.0

    _run(main())


def test_a_key_added_while_it_is_worked_on_is_looked_at_once_more() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        running = 0
        calls = 0

        async def handler(key: str) -> None:
            nonlocal running, calls
            running += 1
            calls += 1
            assert running == 1
            if calls == 1:
                for _ in range(3):
                    queue.add(key)
            await asyncio.sleep(1)
            running -= 1

        queue.add("a")
        await _drain(queue, handler, 10, workers=4)
        assert calls == 2

    _run(main())


@pytest.mark.parametrize("delays", [(5, 1, 3), (1, 5), (3, 0)], ids=str)
def test_of_several_delays_the_earliest_wins(delays: tuple[int, ...]) -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        times: list[float] = []

        async def handler(_: str) -> None:
            times.append(asyncio.get_running_loop().time())

        for delay in delays:
            queue.add("a", delay)
        await _drain(queue, handler, 60)
        assert times == pytest.approx([min(delays)])

    _run(main())


def test_a_failing_key_backs_off_up_to_a_minute_and_starts_over_after_a_success() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        times: list[float] = []

        async def handler(key: str) -> None:
            times.append(asyncio.get_running_loop().time())
            if len(times) <= 9:
                raise RuntimeError("broken")
            if len(times) == 10:
                queue.add(key, 7)
            elif len(times) == 11:
                raise RetryLaterError("once more")

        queue.add("a")
        await _drain(queue, handler, 1000)
        gaps = [round(b - a, 3) for a, b in itertools.pairwise(times)]
        assert gaps == [0.5, 1, 2, 4, 8, 16, 32, LAST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS, 7, 0.5]

    _run(main())


def test_news_come_before_the_backoff_but_not_before_the_time_the_server_asked_for() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        times: dict[str, list[float]] = defaultdict(list)

        async def handler(key: str) -> None:
            times[key].append(asyncio.get_running_loop().time())
            if len(times[key]) == 1:
                raise RetryLaterError("no", 20.0 if key == "throttled" else None)

        for key in ("throttled", "failed"):
            queue.add(key)
            asyncio.get_running_loop().call_later(0.1, queue.add, key)
        await _drain(queue, handler, 100)
        assert times["failed"][:2] == pytest.approx([0, 0.1])
        assert times["throttled"] == pytest.approx([0, 20])

    _run(main())


def test_close_lets_the_handler_under_way_end_and_starts_no_other() -> None:
    async def main() -> None:
        queue: WorkQueue[str] = WorkQueue()
        ended: list[str] = []

        async def handler(key: str) -> None:
            queue.close()
            await asyncio.sleep(5)
            ended.append(key)

        queue.add("a")
        queue.add("b")
        queue.add("c", 1)
        await queue.run(handler, 1)
        queue.add("d")
        assert ended == ["a"]

    _run(main())


@settings(max_examples=60, deadline=None)
@given(
    adds=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 9), st.floats(0, 5)), max_size=25),
    fails=st.sets(st.integers(0, 20)),
    workers=st.integers(1, 4),
    work=st.floats(0, 2),
)
def test_nothing_added_is_ever_lost_and_no_key_runs_twice_at_a_time(
    adds: list[tuple[str, float, float]], fails: set[int], workers: int, work: float
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        queue: WorkQueue[str] = WorkQueue()
        running: set[str] = set()
        started: dict[str, list[float]] = defaultdict(list)
        calls = 0

        async def handler(key: str) -> None:
            nonlocal calls
            assert key not in running
            running.add(key)
            started[key].append(loop.time())
            calls += 1
            failing = calls in fails
            await asyncio.sleep(work)
            running.discard(key)
            if failing:
                raise RuntimeError("broken")

        due: dict[str, float] = {}
        for key, at, delay in adds:
            loop.call_later(at, queue.add, key, delay)
            due[key] = max(due.get(key, 0), at)
        await _drain(queue, handler, 2000, workers)
        for key, last_added in due.items():
            assert started[key][-1] >= last_added - 1e-9, "news that came last was never looked at"
            assert len(started[key]) <= sum(1 for k, _, _ in adds if k == key) + len(fails)

    _run(main())
