"""The side of one rank: what it has to train, and the turns in which contenders share the machine.

A contender keeps its processes for the whole row, and all others sleep while it makes its steps: so start-up is paid
once, and what else this machine does slows everyone alike. Needs nothing but torch: it runs in peers' environments.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

TASK = "PEER_TASK"
PIPES = "PEER_PIPES"


@dataclass(frozen=True)
class Task:
    """The same for every contender of a row."""

    folder: str
    layout: str
    """zero1, zero3, tensor or pipeline."""
    precision: str
    """fp32 or bf16."""
    steps: int
    """At most."""
    dim: int = 256
    layers: int = 6
    heads: int = 16
    ffn_dim: int = 768
    vocabulary: int = 2048
    length: int = 256
    batch: int = 8
    """Sequences in a step, of all ranks together."""
    ranks: int = 2
    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip: float = 1.0
    theta: float = 10000.0
    norm_epsilon: float = 1e-5

    @classmethod
    def read(cls) -> Task:
        raw = json.loads(os.environ[TASK])
        return cls(**{field.name: raw[field.name] for field in fields(cls)})

    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def micro_batch(self) -> int:
        """Sequences in one forward pass: four of them fill a pipeline, elsewhere one takes a rank's whole share."""
        return {"pipeline": self.batch // 4, "tensor": self.batch}.get(self.layout, self.batch // self.ranks)

    def weights(self) -> dict[str, Tensor]:
        """Return the first values, fp32, by our names of parameters."""
        loaded: dict[str, Tensor] = torch.load(Path(self.folder) / "weights.pt")
        return loaded

    def batches(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of all steps, int64 [steps, batch, length]."""
        rows = torch.load(Path(self.folder) / "tokens.pt")
        return rows[:, :, :-1].contiguous(), rows[:, :, 1:].contiguous()

    def own(self, step_of_batch: Tensor) -> Tensor:
        """Return this rank's part of one step's sequences under data parallel."""
        share, rank = self.batch // self.ranks, int(os.environ["RANK"])
        return step_of_batch[rank * share : (rank + 1) * share]


class Turns:
    """Called before and after every step: waits for this contender's turn, and tells how long it took."""

    def __init__(self) -> None:
        orders, answers = map(int, os.environ[PIPES].split(","))
        self._orders, self._answers = os.fdopen(orders), os.fdopen(answers, "w")
        self._left, self._started = 0, 0.0
        self._losses: list[float] = []

    def begin(self) -> None:
        """Return when a step may be made; end the process when no more are wanted."""
        if self._left == 0:
            order = self._orders.readline()
            if not order:
                os._exit(0)
            self._left, self._started = int(order), time.perf_counter()

    def end(self, loss: float) -> None:
        """Note a step and this rank's share of its loss: the shares of all ranks make up the mean."""
        self._losses.append(loss)
        self._left -= 1
        if self._left == 0:
            answer = {"seconds": time.perf_counter() - self._started, "losses": self._losses}
            self._answers.write(json.dumps(answer) + "\n")
            self._answers.flush()
            self._losses = []
