"""Plain DistributedDataParallel: no sharding, every rank steps the whole optimizer. ZeRO-1's measure."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.llama import Llama, loss_of
from benchmarks.peers.turns import Task, Turns


def main() -> None:
    task, turns = Task.read(), Turns()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bare = Llama(task)
    bare.load_state_dict(task.weights())
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
    betas = (task.beta1, task.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.rate, betas=betas, eps=task.epsilon, weight_decay=0.0, fused=True
    )
    for inputs, targets in zip(*task.batches(), strict=True):
        turns.begin()
        with torch.autocast("cpu", torch.bfloat16, enabled=task.precision == "bf16"):
            logits = model(task.own(inputs))
        loss = loss_of(logits, task.own(targets))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        turns.end(loss.item() / task.ranks)


if __name__ == "__main__":
    main()
