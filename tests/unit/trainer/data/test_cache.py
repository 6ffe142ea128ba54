from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from llmtrain_api.launch import RankLaunch
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.data import cache
from llmtrain_trainer.data.loader import BatchPlan, Loader
from llmtrain_trainer.data.order import SampleOrder
from llmtrain_trainer.data.sources import open_sources
from llmtrain_trainer.data.tokenizer import ByteTokenizer, JsonTokenizer, open_tokenizer
from llmtrain_trainer.errors import UserError


def _config(*uris: str, tokenizer: str | None = None, volumes: dict[str, str] | None = None) -> RunConfig:
    spec = {
        "workers": {"image": "none", "device": "cpu"},
        "model": {"preset": "tiny"},
        "training": {"steps": 1},
        "data": {"sources": [{"uri": uri} for uri in uris], "tokenizer": {"uri": tokenizer}},
        "checkpoint": {"store": "file:///nowhere"},
    }
    place = {"attempt": 1, "global_rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1, "local_world_size": 1}
    where = {"master_address": "127.0.0.1", "master_port": 1, "error_file": "", "volumes": volumes or {}}
    return RunConfig.of(RankLaunch.model_validate({"run_id": "a/b", "spec": spec, **place, **where}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    (root / "sub" / ".git").mkdir(parents=True)
    (root / "b.txt").write_text("bb")
    (root / "sub" / "a.md").write_text("a\u00e9")
    (root / "sub" / ".git" / "x.txt").write_text("hidden")
    (root / "image.png").write_bytes(b"\x89PNG")
    (root / "rows.jsonl").write_text('{"text": "r1"}\n\n{"text": "r2", "more": 1}\n')
    return root


@pytest.mark.parametrize(
    ("path", "documents"),
    [
        ("", ["bb", "r1", "r2", "a\u00e9"]),
        ("/b.txt", ["bb"]),
        ("/image.png*", []),
        ("/**/*.md", ["a\u00e9"]),
        ("/*.jsonl", ["r1", "r2"]),
    ],
    ids=["folder", "file", "glob of no text", "recursive glob", "glob of JSON lines"],
)
def test_what_an_address_stands_for(folder: Path, path: str, documents: list[str]) -> None:
    for config in (_config(f"file://{folder}{path}"), _config(f"pvc://disk{path}", volumes={"disk": str(folder)})):
        if documents:
            assert list(open_sources(config)[0].documents()) == documents
        else:
            with pytest.raises(UserError):
                list(open_sources(config)[0].documents())


def test_the_standard_library_is_text_enough_and_the_same_each_time() -> None:
    first, second = (open_sources(_config("builtin://python-stdlib"))[0] for _ in range(2))
    assert first == second
    assert len(first.files) > 300
    assert not [f for f in first.files if {"test", "idlelib", "site-packages"} & set(f.relative_to(first.root).parts)]


def test_documents_follow_each_other_with_an_end_mark(folder: Path, tmp_path: Path) -> None:
    sources = open_sources(_config(f"file://{folder}/b.txt", f"file://{folder}/sub/a.md"))
    made = cache.build(tmp_path / "cache", "n", sources, ByteTokenizer())
    assert made.map().tolist() == [98, 98, 256, 97, 0xC3, 0xA9, 256]
    assert (made.tokens, made.dtype) == (7, "uint16")
    assert cache.find(tmp_path / "cache", "n") == made
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["n.bin", "n.json"]


def test_a_cache_counts_only_when_it_is_whole(folder: Path, tmp_path: Path) -> None:
    sources = open_sources(_config(f"file://{folder}/b.txt"))
    made = cache.build(tmp_path, "n", sources, ByteTokenizer())
    made.path.write_bytes(made.path.read_bytes()[:-1])
    assert cache.find(tmp_path, "n") is None
    (tmp_path / "n.json").write_text("{")
    assert cache.find(tmp_path, "n") is None


def test_the_name_changes_with_the_files_and_the_fingerprint_with_the_content(folder: Path, tmp_path: Path) -> None:
    def state() -> tuple[str, str]:
        sources = open_sources(_config(f"file://{folder}"))
        name = cache.cache_name(sources, ByteTokenizer())
        return name, cache.build(tmp_path, name, sources, ByteTokenizer()).fingerprint

    before = state()
    assert state() == before
    os.utime(folder / "b.txt", (1, 1))
    touched = state()
    assert touched[0] != before[0] and touched[1] == before[1]
    (folder / "b.txt").write_text("bc")
    assert state()[1] != before[1]


def test_a_tokenizer_file_is_used_and_ends_documents(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    file = tmp_path / "tokenizer.json"
    inner.save(str(file))
    tokenizer = open_tokenizer(_config("builtin://python-stdlib", tokenizer=f"file://{file}"))
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("a b c").tolist() == [1, 2, 0, 3]
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": "1.0 "}))
    with pytest.raises(UserError, match="is no tokenizer"):
        open_tokenizer(_config("builtin://python-stdlib", tokenizer=f"file://{file}"))


def test_a_tokenizer_file_cannot_cut_or_pad_documents_and_gaps_in_its_ids_are_counted(tmp_path: Path) -> None:
    inner = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 70_000}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.enable_truncation(max_length=2)
    inner.enable_padding(length=8)
    file = tmp_path / "tokenizer.json"
    inner.save(str(file))
    tokenizer = JsonTokenizer(Tokenizer.from_file(str(file)), "f")
    assert tokenizer.encode("a b a b a").tolist() == [1, 70_000, 1, 70_000, 1]
    with pytest.raises(UserError, match="70001 different tokens"):
        open_tokenizer(_config("builtin://python-stdlib", tokenizer=f"file://{file}"))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": "half \\ud83d"}\n', "line 2 holds half of a surrogate pair"),
        ("a.jsonl", b'{"text": "\xff"}\n', "cannot be read"),
        ("a.jsonl", b'{"text": 7}\n', "line 1 is no JSON object"),
        ("a.txt", b"\xff\xfe", "cannot be read"),
        ("a.txt", b"", "all its files are empty"),
    ],
    ids=["half a surrogate pair", "JSON lines not UTF-8", "text that is no string", "text not UTF-8", "empty"],
)
def test_text_that_cannot_be_used_is_the_users_error_and_leaves_no_cache(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    sources = open_sources(_config(f"file://{tmp_path}/in"))
    with pytest.raises(UserError, match=problem):
        cache.build(tmp_path / "out", "n", sources, ByteTokenizer())
    assert list((tmp_path / "out").iterdir()) == []


def test_names_of_files_need_not_be_utf8(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.txt")
    with open(path, "wb") as file:
        file.write(b"text")
    sources = open_sources(_config(f"file://{tmp_path}"))
    made = cache.build(tmp_path / "out", cache.cache_name(sources, ByteTokenizer()), sources, ByteTokenizer())
    assert made.tokens == 5


def test_targets_are_the_inputs_moved_by_one_and_no_token_is_left_out() -> None:
    tokens = np.arange(41, dtype=np.uint16)
    loader = Loader(tokens, SampleOrder(10, 3), 4)
    plan = BatchPlan(global_batch=10, micro_batch=5, data_ranks=1)
    batches = list(loader.step(0, plan, 0))
    assert [b[0].shape for b in batches] == [(5, 4), (5, 4)]
    for inputs, targets in batches:
        assert torch.equal(inputs + 1, targets)
    assert sorted(torch.cat([t for _, t in batches]).flatten().tolist()) == list(range(1, 41))


@pytest.mark.parametrize(("tokens", "count"), [(9, 2), (12, 2), (13, 3), (5, 1)])
def test_sequences_overlap_by_the_token_that_is_predicted(tokens: int, count: int, tmp_path: Path) -> None:
    made = cache.TokenCache(tmp_path, tokens, "uint16", "")
    assert cache.sequences_in(made, 4, []) == count
