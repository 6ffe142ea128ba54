"""Programs that run in a process of their own, so that nothing of one is left on the GPU for the next.

    python -m hack.gpu_check.single compile DEVICE MODEL
    python -m hack.gpu_check.single plain|transformers|torchtitan DEVICE MODEL BATCH STEPS

MODEL is spec.model as JSON. The second kind trains the same model as a peer has it, by the plainest loop that torch
allows: fp32 weights, autocast to bf16, fused AdamW. What they find is the last line of their output, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmtrain_api.presets import ModelDimensions
from llmtrain_api.spec_model import Model
from llmtrain_trainer.model.transformer import Block, Transformer, rotary_tables

Forward = Callable[[Tensor], Tensor]
"""Tokens [B, L] to logits [B, L, V]."""
WARM_UP = 3


def compiled_block(device: torch.device, dims: ModelDimensions) -> dict[str, Any]:
    """Compare a layer and its compiled form: result and gradients in fp32, and the time of both, on a GPU in bf16."""
    block = _random(Block(dims, 0)).to(device)
    compiled = torch.compile(block, fullgraph=True)
    tables = rotary_tables(dims, device)
    x = torch.randn(2, dims.sequence_length, dims.dim, device=device)
    worst = 0.0
    (eager, *eager_gradients), (fused, *gradients) = (_with_gradients(b, block, x, tables) for b in (block, compiled))
    for a, b in zip((eager, *eager_gradients), (fused, *gradients), strict=True):
        worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    if device.type == "cuda":  # a CPU would compile once more for nothing: its speed is not judged
        block, x = block.bfloat16(), x.bfloat16()
    seconds = [_time(lambda b=b: _with_gradients(b, block, x, tables), device) for b in (block, compiled)]
    return {
        "worst": worst,
        "eager_seconds": seconds[0],
        "compiled_seconds": seconds[1],
    }


def _with_gradients(run: Callable[..., Any], block: nn.Module, x: Tensor, tables: Any) -> list[Tensor]:
    """Return a layer's result and the gradients of its parameters."""
    block.zero_grad(set_to_none=True)
    result = run(x, *tables)
    result.float().square().mean().backward()
    return [result.detach(), *(p.grad for p in block.parameters() if p.grad is not None)]


def _random(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    return model


def _plain(device: torch.device, dims: ModelDimensions) -> tuple[nn.Module, Forward]:
    """Return our own network without anything around it."""
    with device:
        model = _random(Transformer(dims))
    tables = rotary_tables(dims, device)
    return model, lambda tokens: model(tokens, tables)


def _transformers(device: torch.device, dims: ModelDimensions) -> tuple[nn.Module, Forward]:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = LlamaConfig(
        hidden_size=dims.dim,
        num_hidden_layers=dims.layers,
        num_attention_heads=dims.heads,
        num_key_value_heads=dims.kv_heads,
        intermediate_size=dims.ffn_dim,
        vocab_size=dims.vocab_size,
        max_position_embeddings=dims.sequence_length,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with device:
        model = _random(LlamaForCausalLM(options))
    return model, lambda tokens: model(tokens).logits


def _torchtitan(device: torch.device, dims: ModelDimensions) -> tuple[nn.Module, Forward]:
    """Return torchtitan's own model of 1B (or its smallest); its trainer wants data that no package brings.

    Its attention goes backward on GPUs alone.
    """
    from torchtitan.models.llama3 import llama3_configs

    with device:
        model = llama3_configs["1B" if dims.dim == 2048 else "debugmodel"](attn_backend="flex").build()
    positions = torch.arange(dims.sequence_length, device=device).unsqueeze(0)
    mask = model.get_attention_masks(positions=positions)  # of one sequence: causal, the same for all of a batch
    return _random(model), lambda tokens: model(tokens, positions.expand_as(tokens), mask)


PEERS = {"plain": _plain, "transformers": _transformers, "torchtitan": _torchtitan}


def train(make: Callable[..., tuple[nn.Module, Forward]], device: torch.device, arguments: list[str]) -> dict[str, Any]:
    """Return the median speed, in tokens per second."""
    dims = _dimensions(arguments[0])
    batch, steps = int(arguments[1]), int(arguments[2])
    model, forward = make(device, dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 256, (batch, dims.sequence_length + 1), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            logits = forward(tokens[:, :-1])
        functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = _time(step, device, steps)
    return {
        "tokens_per_second": batch * dims.sequence_length / seconds,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def _time(work: Callable[[], Any], device: torch.device, times: int = 10) -> float:
    """Return the median seconds, after some that warm up."""
    found = []
    for _ in range(WARM_UP + times):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return statistics.median(found[WARM_UP:])


def _dimensions(text: str) -> ModelDimensions:
    return Model.model_validate(json.loads(text)).dimensions()


def main(arguments: list[str]) -> int:
    kind, device, *rest = arguments
    where = torch.device(device)
    found = compiled_block(where, _dimensions(rest[0])) if kind == "compile" else train(PEERS[kind], where, rest)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
