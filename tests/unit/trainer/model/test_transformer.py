from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import llmtrain_trainer.model
from llmtrain_api.presets import PRESETS, ModelDimensions
from llmtrain_trainer.model.init import ROWS_PER_DRAW, fill, standard_deviation
from llmtrain_trainer.model.transformer import Transformer, loss_sum, rotary_tables

DIMS = ModelDimensions(dim=24, layers=2, heads=4, kv_heads=2, ffn_dim=32, vocab_size=50, sequence_length=12)


def _model() -> Transformer:
    model = Transformer(DIMS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = standard_deviation(name, DIMS.layers)
            if std is None:
                parameter.fill_(1.0)
            else:
                fill(parameter, (0,) * parameter.ndim, tuple(parameter.shape), name=name, seed=1, std=std * 5)
    return model


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_parameter_count_is_what_the_contract_says(preset: str) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[preset])
    assert sum(p.numel() for p in model.parameters()) == PRESETS[preset].parameter_count()


def test_a_token_sees_itself_and_the_past_only() -> None:
    model, rotary = _model(), rotary_tables(DIMS, torch.device("cpu"))
    tokens = torch.arange(12).remainder(50).view(1, 12)
    changed = tokens.clone()
    changed[0, 7] = 42
    with torch.no_grad():
        before, after = model(tokens, rotary), model(changed, rotary)
    assert torch.equal(before[0, :7], after[0, :7])
    assert (before[0, 7:] - after[0, 7:]).abs().amax(-1).min() > 1e-5


def test_grouped_query_attention_is_the_textbook_formula() -> None:
    model, rotary = _model(), rotary_tables(DIMS, torch.device("cpu"))
    attention = model.layers["0"].attention
    x = torch.randn(2, 12, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = attention(x, *rotary)
        expected = _textbook_attention(attention, x, rotary)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def _textbook_attention(
    attention: torch.nn.Module, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """One head and one position at a time, with rotation as a complex product."""
    angles = torch.complex(*(table[:, 3:] for table in rotary))  # [L, E/2]
    out = torch.zeros(2, 12, 24)
    for head in range(4):
        q = _head(x, attention.wq.weight, head, angles)
        k = _head(x, attention.wk.weight, head // 2, angles)
        v = x @ attention.wv.weight[(head // 2) * 6 : (head // 2 + 1) * 6].T
        for position in range(12):
            scores = (q[:, position : position + 1] * k[:, : position + 1]).sum(-1) / 6**0.5
            weights = scores.softmax(-1)
            out[:, position, head * 6 : (head + 1) * 6] = (weights[..., None] * v[:, : position + 1]).sum(1)
    return out @ attention.wo.weight.T


def _head(x: torch.Tensor, weight: torch.Tensor, head: int, angles: torch.Tensor) -> torch.Tensor:
    projected = x @ weight[head * 6 : (head + 1) * 6].T
    turned = torch.complex(projected[..., :3], projected[..., 3:]) * angles
    return torch.cat((turned.real, turned.imag), -1)


def test_loss_is_the_sum_over_tokens_in_fp32() -> None:
    logits = torch.zeros(2, 3, 50, dtype=torch.bfloat16)
    loss = loss_sum(logits, torch.zeros(2, 3, dtype=torch.int64))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(6 * torch.tensor(50.0).log().item())


@pytest.mark.parametrize("cut", [1, 100, ROWS_PER_DRAW, ROWS_PER_DRAW + 1, 599])
def test_first_values_do_not_depend_on_where_the_shards_are_cut(cut: int) -> None:
    def filled(rows: slice, columns: slice, name: str = "layers.0.attention.wq.weight") -> torch.Tensor:
        part = torch.empty(600, 8)[rows, columns].contiguous()
        fill(part, (rows.start, columns.start), (600, 8), name=name, seed=3, std=0.5)
        return part

    whole = filled(slice(0, 600), slice(0, 8))
    left, right = slice(0, 3), slice(3, 8)
    above, below = slice(0, cut), slice(cut, 600)
    parts = [torch.cat([filled(rows, left), filled(rows, right)], dim=1) for rows in (above, below)]
    assert torch.equal(whole, torch.cat(parts))
    assert whole.std().item() == pytest.approx(0.5, rel=0.05)
    assert not torch.equal(whole, filled(slice(0, 600), slice(0, 8), name="layers.1.attention.wq.weight"))


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("embedding.weight", 0.02),
        ("layers.3.attention.wo.weight", 0.02 / 8**0.5),
        ("layers.3.feed_forward.down.weight", 0.02 / 8**0.5),
        ("layers.3.feed_forward_norm.weight", None),
        ("norm.weight", None),
        ("output.weight", 0.02),
    ],
)
def test_spread_of_first_values(name: str, std: float | None) -> None:
    assert standard_deviation(name, 4) == std


def test_the_model_knows_nothing_of_other_ranks() -> None:
    for file in Path(llmtrain_trainer.model.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.startswith(("torch.distributed", "llmtrain_trainer.parallel"))], file
