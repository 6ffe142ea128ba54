"""Attention within documents: a packed sequence computes what its documents compute alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llmtrain_api.presets import ModelDimensions
from llmtrain_trainer.model.documents import document_mask
from llmtrain_trainer.model.transformer import Transformer, rotary_tables

DIMS = ModelDimensions(dim=24, layers=2, heads=4, kv_heads=2, ffn_dim=32, vocab_size=50, sequence_length=12)
END = 49
DOCUMENTS = ([3, 4, 5, END], [END], [6, 7, END], [8, 9, 10, 11])


def _model() -> Transformer:
    torch.manual_seed(3)
    model = Transformer(DIMS)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def _logits(model: Transformer, tokens: list[int], mask_BLS: Tensor | None) -> Tensor:
    cos_LE, sin_LE = (table[: len(tokens)] for table in rotary_tables(DIMS, torch.device("cpu")))
    with torch.no_grad():
        logits_BLV: Tensor = model(torch.tensor([tokens]), (cos_LE, sin_LE), mask_BLS)
    return logits_BLV[0]


def test_documents_of_a_packed_sequence_do_not_see_each_other() -> None:
    packed = [token for document in DOCUMENTS for token in document]
    model = _model()
    within = _logits(model, packed, document_mask(torch.tensor([packed]), END, range(len(packed)), torch.float32))
    alone = torch.cat([_logits(model, document, None) for document in DOCUMENTS])
    torch.testing.assert_close(within, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(_logits(model, packed, None), alone, atol=1e-2), "without the mask they do"


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_parts_of_a_sequence_ask_for_what_the_whole_asks(parts: int) -> None:
    tokens_BS = torch.randint(40, 50, (3, 12), generator=torch.Generator().manual_seed(1))
    whole_BSS = document_mask(tokens_BS, END, range(12), torch.float32)
    length = 12 // parts
    own = (range(n * length, (n + 1) * length) for n in range(parts))
    cut = [document_mask(tokens_BS, END, queries, torch.float32) for queries in own]
    assert torch.equal(torch.cat(cut, dim=1), whole_BSS)
    assert bool((whole_BSS.diagonal(dim1=1, dim2=2) == 0).all()), "a query without keys would be no number"
