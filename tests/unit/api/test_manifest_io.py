"""Users' files: YAML 1.2, several documents, and errors that name the line."""

from __future__ import annotations

import pytest

from llmtrain_api.manifest_io import ManifestError, load_documents


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6e-5", 6e-5),
        ("1e3", 1000.0),
        ("0x10", 16),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("012", 12),
        ("~", None),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert load_documents(f"a: {text}\n", "f") == [{"a": value}]


def test_several_documents_are_returned_in_order_and_empty_ones_left_out() -> None:
    assert load_documents("a: 1\n---\n---\n# nothing\n---\nb: 2\n", "f") == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n", "---\n"], ids=repr)
def test_no_document_is_no_error(text: str) -> None:
    assert load_documents(text, "f") == []


def test_json_is_yaml() -> None:
    assert load_documents('{"a": [1, 2.5e-3, null, true]}', "f") == [{"a": [1, 0.0025, None, True]}]


def test_anchors_and_merges_work() -> None:
    assert load_documents("a: &x {b: 1}\nc: {<<: *x, d: 2}\n", "f") == [{"a": {"b": 1}, "c": {"b": 1, "d": 2}}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", r'f.yaml: line 4: found duplicate key "c".*keep one of the two'),
        ("a: [1, 2\n", r"f.yaml: line 2: no valid YAML"),
        ("a: 1\n b: 2\n", r"f.yaml: line 2: no valid YAML"),
        ("\tx: 1\n", r"f.yaml: line 1: no valid YAML"),
        ("a: \x01\n", r"f.yaml: no valid YAML"),
        ("a: !!python/object:os.system x\n", r"f.yaml: line 1: no valid YAML"),
        ("- a\n", r"f.yaml: document 1 is a list, not a mapping; fix: begin with apiVersion"),
        ("a: 1\n---\nhello\n", r"f.yaml: document 2 is a text, not a mapping"),
    ],
    ids=["duplicate key", "open list", "indentation", "tab", "control character", "python tag", "list", "text"],
)
def test_an_unusable_text_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        load_documents(text, "f.yaml")
