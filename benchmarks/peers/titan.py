"""torchtitan 0.2.2, its own trainer and model, on CPUs and gloo, for which it was not made: see `fit_to_cpu`.

Given away to it: weights in the trainer's type are bf16 alone where it has no mixed precision (tensor and pipeline
parallel without FSDP), which is less work; a step's loss is not reduced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

from benchmarks.peers.turns import Task, Turns

NAMES = {"embedding": "tok_embeddings", "feed_forward_norm": "ffn_norm", "gate": "w1", "down": "w2", "up": "w3"}


def fit_to_cpu() -> None:
    """Stand in for the device module that torchtitan takes for granted; before it is imported."""
    nothing = dict.fromkeys(
        ("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"), lambda *_, **__: None
    )
    stats = dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms"), 0)
    module = SimpleNamespace(
        **nothing,
        current_device=lambda: 0,
        get_device_name=lambda *_: "cpu",
        get_device_properties=lambda *_: SimpleNamespace(total_memory=1 << 34),
        memory_stats=lambda *_: stats,
    )
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda *_: module


def fit_to_gloo() -> None:
    """Gloo knows no scaled sum, which FSDP2 would use, and no barrier for a device."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import utils
    from torchtitan.models.llama3.infra import parallelize

    def undivided(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    parallelize.disable_fsdp_gradient_division = undivided
    utils.set_pg_timeouts = lambda *_, **__: None


def their_name(name: str) -> str:
    return ".".join(NAMES.get(part, part) for part in name.split("."))


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Sort the rows of a query or key matrix for rotary pairs that are neighbours, as torchtitan has them."""
    halves = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


class Data:
    """The task's tokens as torchtitan's dataloader gives them."""

    def __init__(self, task: Task, dp_world_size: int) -> None:
        self._task, self._shared = task, dp_world_size > 1

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for inputs, targets in zip(*self._task.batches(), strict=True):
            own = self._task.own if self._shared else torch.Tensor.contiguous
            yield {"input": own(inputs)}, own(targets)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def specification(task: Task) -> Any:
    """Return torchtitan's Llama 3, with the task's dimensions, first weights and data."""
    from dataclasses import replace

    from torch.distributed.tensor import DTensor, distribute_tensor
    from torchtitan.models import llama3

    # feed-forward: int(2 / 3 * 4 * dim), up to a multiple
    sizes = {"dim": task.dim, "n_layers": task.layers, "n_heads": task.heads, "vocab_size": task.vocabulary}
    rest = {"multiple_of": task.ffn_dim, "rope_theta": task.theta, "norm_eps": task.norm_epsilon}
    no_scaling = llama3.model.args.RoPEScalingArgs(scaling_factor=1.0)
    arguments = llama3.TransformerModelArgs(**sizes, **rest, rope_scaling_args=no_scaling)
    values = {their_name(name): value for name, value in task.weights().items()}
    for name in values:
        if name.split(".")[-2] in ("wq", "wk"):
            values[name] = interleaved(values[name], task.heads)

    class Model(llama3.Transformer):
        def init_weights(self, buffer_device: torch.device | None = None) -> None:
            super().init_weights(buffer_device)
            for name, parameter in self.named_parameters():
                value = values[name].to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)

    return replace(
        llama3.get_train_spec(),
        model_cls=Model,
        model_args={"task": arguments},
        build_tokenizer_fn=None,
        build_validator_fn=None,
        build_dataloader_fn=lambda dp_world_size, **_: Data(task, dp_world_size),
    )


def options(task: Task) -> list[str]:
    """Return torchtitan's command line."""
    sharded = task.layout in ("zero1", "zero3")
    alone = "bfloat16" if task.precision == "bf16" and not sharded else "float32"
    given = {
        "model.name": "task",
        "model.flavor": "task",
        "training.steps": task.steps,
        "training.seq_len": task.length,
        "training.local_batch_size": task.batch // task.ranks if sharded else task.batch,
        "training.max_norm": task.clip,
        "training.dtype": alone,
        "training.mixed_precision_param": "bfloat16" if task.precision == "bf16" else "float32",
        "optimizer.lr": task.rate,
        "optimizer.beta2": task.beta2,
        "optimizer.weight_decay": 0.0,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0.0,
        "metrics.log_freq": 1 << 30,
        "activation_checkpoint.mode": "none",
        "parallelism.data_parallel_shard_degree": task.ranks if sharded else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if task.layout == "zero3" else "never",
        "parallelism.tensor_parallel_degree": task.ranks if task.layout == "tensor" else 1,
        "parallelism.pipeline_parallel_degree": task.ranks if task.layout == "pipeline" else 1,
        "parallelism.pipeline_parallel_microbatch_size": task.micro_batch,
        "comm.trace_buf_size": 0,
        "job.dump_folder": f"{task.folder}/titan",
    }
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


def main() -> None:
    task, turns = Task.read(), Turns()
    torch.set_num_threads(1)
    fit_to_cpu()
    sys.argv = ["torchtitan", *options(task)]  # read while it is imported
    from torchtitan import train
    from torchtitan.protocols.train_spec import register_train_spec

    fit_to_gloo()
    register_train_spec("task", specification(task))
    rank, seen = int(os.environ["RANK"]), []

    class InTurn(train.Trainer):
        def forward_backward_step(self, **given: Any) -> torch.Tensor:
            loss = super().forward_backward_step(**given)
            seen.append(loss)
            return loss

        def train_step(self, data_iterator: Any) -> None:
            turns.begin()
            super().train_step(data_iterator)
            loss = seen.pop().detach()
            whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            mine = {"tensor": rank == 0, "pipeline": rank == task.ranks - 1}.get(task.layout, True)
            turns.end(float(whole) if mine else 0.0)

    train.main(InTurn)


if __name__ == "__main__":
    main()
