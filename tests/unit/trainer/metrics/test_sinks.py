"""A sink that fails, hangs or is slow is told once, and nobody waits for it."""

from __future__ import annotations

import os
import resource
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from llmtrain_trainer.metrics import sinks
from llmtrain_trainer.metrics.record import StepRecord, curves
from llmtrain_trainer.metrics.sinks import QUEUE_STEPS, SinkThread
from llmtrain_trainer.metrics.to_prometheus import PrometheusSink
from llmtrain_trainer.metrics.to_tensorboard import TensorboardSink
from tests.support.ports import free_port

RECORD = StepRecord(
    run_id="n/j",
    attempt=1,
    step=3,
    loss=2.5,
    grad_norm=None,
    learning_rate=1e-3,
    skipped="",
    skipped_steps=1,
    loss_scale=1.0,
    tokens=300,
    tokens_per_second=50.0,
    mfu=0.4,
    step_seconds=2.0,
    split={"forward": 0.5, "backward": 1.5},
    memory_bytes=7,
    memory={"allocated": 5, "peak": 7},
    expert_load=None,
    time=1.0,
)


class Notebook:
    """A sink that writes down what it is told, after it has failed so many times."""

    def __init__(self, failures: int = 0) -> None:
        self.steps: list[int] = []
        self.opened = 0
        self.closed = 0
        self._failures = failures

    def open(self, _: StepRecord) -> Notebook:
        self.opened += 1
        return self

    def write(self, record: StepRecord) -> None:
        if self._failures:
            self._failures -= 1
            raise OSError("no space left")
        self.steps.append(record.step)

    def close(self) -> None:
        self.closed += 1


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _finish(thread: SinkThread) -> None:
    thread.close(time.monotonic() + 60)


def test_records_arrive_in_order_and_the_sink_is_closed() -> None:
    book = Notebook()
    thread = SinkThread("book", book.open)
    for step in range(5):
        thread.write(replace(RECORD, step=step))
    _finish(thread)
    assert (book.steps, book.opened, book.closed, thread.complaint()) == ([0, 1, 2, 3, 4], 1, 1, None)


def test_a_failure_is_told_once_and_the_sink_is_opened_anew_later() -> None:
    book = Notebook(failures=2)
    thread = SinkThread("book", book.open, retry_seconds=0.0)
    for step in range(4):
        thread.write(replace(RECORD, step=step))
    _finish(thread)
    assert thread.complaint() == "OSError: no space left"
    assert thread.complaint() is None
    assert (book.steps, book.opened) == ([2, 3], 3)


def test_between_tries_records_are_left_out() -> None:
    book = Notebook(failures=1)
    thread = SinkThread("book", book.open)
    for step in range(4):
        thread.write(replace(RECORD, step=step))
    _finish(thread)
    assert (book.steps, book.opened) == ([], 1)


def test_a_package_that_is_missing_is_not_looked_for_again() -> None:
    tries: list[int] = []

    def missing(_: StepRecord) -> Notebook:
        tries.append(1)
        import llmtrain_no_such_package

        return llmtrain_no_such_package

    thread = SinkThread("book", missing, retry_seconds=0.0)
    for _ in range(3):
        thread.write(RECORD)
    _finish(thread)
    told = thread.complaint()
    assert told and "llmtrain_no_such_package" in told and "install the package" in told
    assert tries == [1]


def test_a_sink_that_hangs_delays_neither_steps_nor_the_end() -> None:
    released = threading.Event()

    class Stuck(Notebook):
        def write(self, record: StepRecord) -> None:
            released.wait(60)

    thread = SinkThread("stuck", Stuck().open)
    started = time.monotonic()
    for _ in range(2 * QUEUE_STEPS):
        thread.write(RECORD)
    thread.close(time.monotonic() + 0.2)
    assert time.monotonic() - started < 30
    told = thread.complaint()
    assert told and f"{QUEUE_STEPS} steps behind" in told
    released.set()


def test_curves_leave_out_what_is_null_or_no_number() -> None:
    found = curves(RECORD)
    assert found["loss"] == 2.5 and found["split/backward"] == 1.5 and found["memory/peak"] == 7.0
    assert not {"grad_norm", "expert_load", "run_id", "skipped", "step", "time"} & set(found)


def test_prometheus_reads_the_newest_step_over_http() -> None:
    port = free_port()
    sink = PrometheusSink(port)
    address = f"http://127.0.0.1:{port}/metrics"
    assert urllib.request.urlopen(address, timeout=10).read() == b""
    sink.write(replace(RECORD, step=2))
    sink.write(RECORD)
    text = urllib.request.urlopen(address, timeout=10).read().decode()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["llmtrain_training_step",] == 3
    assert samples["llmtrain_training_loss",] == 2.5
    assert samples["llmtrain_training_mfu_ratio",] == 0.4
    assert samples["llmtrain_training_tokens_total",] == 300
    assert samples["llmtrain_training_step_part_seconds", "backward"] == 1.5
    assert samples["llmtrain_training_memory_bytes", "peak"] == 7
    assert not [key for key in samples if "gradient_norm" in key[0]], "null is no number"
    sink.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=10)


def test_a_full_disk_under_tensorboard_is_told(tmp_path: Path) -> None:
    """The limit on a file's size stands in for the disk."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, resource.RLIM_INFINITY))
        thread = SinkThread("tensorboard", lambda first: TensorboardSink(str(tmp_path), first.step))
        for step in range(200):
            thread.write(replace(RECORD, step=step))
        _finish(thread)
        os.write(write, (thread.complaint() or "").encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as told:
        assert "File too large" in told.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_every_sink_of_the_resource_has_its_module() -> None:
    from llmtrain_api.spec_metrics import Metrics

    assert set(sinks.MODULES) == set(Metrics.model_fields)
