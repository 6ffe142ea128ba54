"""The newest step at /metrics of rank 0, for Prometheus to fetch. Imported by the sink's thread alone."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.metrics.record import StepRecord


class PrometheusSink(Collector):
    """Serves the newest record. No labels but parts of a whole: who we are, Prometheus knows of the pod."""

    def __init__(self, port: int) -> None:
        self._record: StepRecord | None = None
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(port, registry=registry)

    def write(self, record: StepRecord) -> None:
        self._record = record

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of the newest step; called by the server's threads."""
        record = self._record
        if record is None:
            return
        gauges = (
            ("step", "Optimizer steps done.", record.step),
            ("loss", "Mean loss of the newest step, nats per token.", record.loss),
            ("gradient_norm", "Of the whole gradient, before clipping.", record.grad_norm),
            ("learning_rate", "Of the newest step.", record.learning_rate),
            ("loss_scale", "1 but for fp16.", record.loss_scale),
            ("tokens_per_second", "Over all ranks.", record.tokens_per_second),
            ("mfu_ratio", "Part of the peak of all GPUs that the model's own operations use.", record.mfu),
            ("step_seconds", "Time of the newest step.", record.step_seconds),
            ("expert_load_ratio", "Load of the busiest expert, by its even share.", record.expert_load),
        )
        for name, text, value in gauges:
            if value is not None:
                yield GaugeMetricFamily(f"llmtrain_training_{name}", text, value=value)
        yield CounterMetricFamily("llmtrain_training_tokens", "Tokens trained on.", value=record.tokens)
        yield CounterMetricFamily("llmtrain_training_skipped_steps", "Steps not made.", value=record.skipped_steps)
        yield _parts("step_part_seconds", "Time of the newest step on rank 0, by part.", "part", record.split)
        memory = {kind: float(size) for kind, size in record.memory.items()}
        yield _parts("memory_bytes", "Memory of rank 0, by kind.", "kind", memory)


def open_sink(config: RunConfig, first: StepRecord) -> PrometheusSink:
    """Listen at spec.metrics.prometheus.port.

    Raises:
        OSError: the port is taken.
    """
    assert config.spec.metrics.prometheus is not None
    port = config.spec.metrics.prometheus.port
    try:
        return PrometheusSink(port)
    except OSError as error:
        raise OSError(f"metrics.prometheus.port {port}: {error.strerror or error}; choose a free port") from error


def _parts(name: str, text: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"llmtrain_training_{name}", text, labels=[label])
    for part, value in values.items():
        family.add_metric([part], value)
    return family
