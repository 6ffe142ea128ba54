"""DeepSpeed 0.19.8 on CPUs and gloo: its engine around the plain Llama; PipelineModule for the pipeline."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"

from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from benchmarks.peers.llama import Block, Llama, loss_of, rotary
from benchmarks.peers.turns import Task, Turns

COLUMNS = [r".*\.(wq|wk|wv|gate|up)\.weight$"]
ROWS = [r".*\.(wo|down)\.weight$"]


def configuration(task: Task) -> dict[str, Any]:
    """Return the engine's configuration; without a global batch, which it would share out over tensor ranks too."""
    return {
        "train_micro_batch_size_per_gpu": task.micro_batch,
        "gradient_accumulation_steps": task.batch // task.micro_batch if task.layout == "pipeline" else 1,
        "gradient_clipping": task.clip,
        "bf16": {"enabled": task.precision == "bf16"},
        "zero_optimization": {"stage": {"zero1": 1, "zero3": 3}.get(task.layout, 0)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
        **(tensor_parallel(task) if task.layout == "tensor" else {}),
    }


def tensor_parallel(task: Task) -> dict[str, Any]:
    """Return what cuts the layers; embedding and output stay whole, as AutoTP leaves them."""
    cuts = [
        {"patterns": COLUMNS, "partition_type": "column"},
        {"patterns": ROWS, "partition_type": "row"},
    ]
    layers = {"use_default_specs": False, "layer_specs": cuts}
    return {"tensor_parallel": {"autotp_size": task.ranks, "partition_config": layers}}


class Layer(Block):
    """A block that brings its rotary tables along: a pipeline passes one tensor on."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        for name, table in zip(("cos", "sin"), rotary(task), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, self.cos, self.sin)


def pipeline(task: Task) -> nn.Module:
    """Return the model as DeepSpeed cuts it: three layers on each of two ranks, with first weights."""
    from deepspeed.pipe import PipelineModule

    embedding, norm = nn.Embedding(task.vocabulary, task.dim), nn.RMSNorm(task.dim, eps=task.norm_epsilon)
    output = nn.Linear(task.dim, task.vocabulary, bias=False)
    ends = {"embedding": embedding, "norm": norm, "output": output}
    layers = {f"layers.{number}": Layer(task) for number in range(task.layers)}
    weights = task.weights()
    for name, module in {**ends, **layers}.items():
        own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        module.load_state_dict(own)
    parts = [embedding, *layers.values(), norm, output]
    return PipelineModule(parts, num_stages=task.ranks, loss_fn=loss_of, partition_method="type:Layer")


def optimizer_of(model: nn.Module, task: Task) -> torch.optim.Optimizer:
    betas = (task.beta1, task.beta2)
    return torch.optim.AdamW(
        model.parameters(), lr=task.rate, betas=betas, eps=task.epsilon, weight_decay=0.0, fused=True
    )


def train(task: Task, turns: Turns) -> None:
    model = Llama(task)
    model.load_state_dict(task.weights())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model, task), config=configuration(task))
    for inputs, targets in zip(*task.batches(), strict=True):
        turns.begin()
        inputs, targets = (inputs, targets) if task.layout == "tensor" else (task.own(inputs), task.own(targets))
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        turns.end(loss.item() / task.ranks)


def train_pipeline(task: Task, turns: Turns) -> None:
    model = pipeline(task)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model, task), config=configuration(task))
    for inputs, targets in zip(*task.batches(), strict=True):
        turns.begin()
        parts = zip(inputs.split(task.micro_batch), targets.split(task.micro_batch), strict=True)
        loss = engine.train_batch(data_iter=iter(list(parts)))
        turns.end(loss.item() / task.ranks)  # every rank is told the mean


def main() -> None:
    task, turns = Task.read(), Turns()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    (train_pipeline if task.layout == "pipeline" else train)(task, turns)


if __name__ == "__main__":
    main()
