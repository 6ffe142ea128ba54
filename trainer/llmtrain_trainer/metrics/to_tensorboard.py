"""Steps as event files for TensorBoard. Imported by the sink's thread alone: the package may be missing."""

from __future__ import annotations

from torch.utils.tensorboard import SummaryWriter

from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.metrics.record import StepRecord, curves


class TensorboardSink:
    """One event file per attempt. Steps that a restart repeats replace those of the attempt before."""

    def __init__(self, folder: str, first_step: int) -> None:
        # What `purge_step` says is written to the file: TensorBoard then drops older attempts' points from there on.
        self._writer = SummaryWriter(folder, purge_step=first_step)

    def write(self, record: StepRecord) -> None:
        for name, value in curves(record).items():
            self._writer.add_scalar(name, value, record.step, walltime=record.time)
        self._writer.flush()  # a rank ends by a kill as often as not, and a full disk is to be noticed

    def close(self) -> None:
        self._writer.close()


def open_sink(config: RunConfig, first: StepRecord) -> TensorboardSink:
    """Open the folder that spec.metrics.tensorboard names.

    Raises:
        UserError: the address is malformed, or its claim is not mounted here.
        OSError: it cannot be written.
    """
    assert config.spec.metrics.tensorboard is not None
    folder = config.local_path("metrics.tensorboard.uri", config.spec.metrics.tensorboard.uri)
    return TensorboardSink(str(folder), first.step)
