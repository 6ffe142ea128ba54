"""A Llama as one writes it down, for the peers that bring no model: our mathematics and names, none of our code."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers.turns import Task


class Attention(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.head_dim = task.dim // task.heads
        self.wq = nn.Linear(task.dim, task.dim, bias=False)
        self.wk = nn.Linear(task.dim, task.dim, bias=False)
        self.wv = nn.Linear(task.dim, task.dim, bias=False)
        self.wo = nn.Linear(task.dim, task.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(o.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.gate = nn.Linear(task.dim, task.ffn_dim, bias=False)
        self.up = nn.Linear(task.dim, task.ffn_dim, bias=False)
        self.down = nn.Linear(task.ffn_dim, task.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(task.dim, eps=task.norm_epsilon)
        self.attention = Attention(task)
        self.feed_forward_norm = nn.RMSNorm(task.dim, eps=task.norm_epsilon)
        self.feed_forward = FeedForward(task)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Tokens [B, L] to logits [B, L, V]."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embedding = nn.Embedding(task.vocabulary, task.dim)
        self.layers = nn.ModuleList(Block(task) for _ in range(task.layers))
        self.norm = nn.RMSNorm(task.dim, eps=task.norm_epsilon)
        self.output = nn.Linear(task.dim, task.vocabulary, bias=False)
        cos, sin = rotary(task)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


def rotary(task: Task) -> tuple[Tensor, Tensor]:
    width = task.dim // task.heads
    frequency = task.theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(task.length, dtype=torch.float64), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().float(), angle.sin().float()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
