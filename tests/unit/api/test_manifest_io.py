"""Users' files: YAML 1.2, several documents, and errors that name the line."""

from __future__ import annotations

import pytest

from llmtrain_api.manifest_io import MAX_DEPTH, ManifestError, load_documents, read_documents


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
        ("2024-01-01", "2024-01-01"),
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
        ("[" * 5000, r"f.yaml: nested too deep; allowed: at most 100 levels; fix: look for"),
        ("a: " + "[" * 3000 + "]" * 3000, r"f.yaml: nested too deep"),
        ("a:\n " + "[" * 101 + "]" * 101, r"f.yaml: line 2: nested too deep"),
        ("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 3000)), "line .*: nested too deep"),
        ("a: &a\n  b: *a\n", r"f.yaml: line .*: nested too deep"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)),
            r"line .*: holds too many values; allowed: at most \d+; fix: use fewer aliases",
        ),
        ("a: 1\nb: " + "9" * 5000, r"^f.yaml: line 2: a number has too many digits; allowed: 64 bits; fix: [^_]*$"),
        ("b: 0x" + "f" * 5000, r"f.yaml: line 1: a number has too many digits"),
        ("a: 1\n? [b]\n: 1\n", r"f.yaml: line 2: a key is a list or a mapping; allowed: a text"),
    ],
    ids=[
        "duplicate key",
        "open list",
        "indentation",
        "tab",
        "control character",
        "python tag",
        "list",
        "text",
        "brackets",
        "nested list",
        "nested just too deep",
        "nested by aliases",
        "inside itself",
        "aliases of aliases",
        "long number",
        "long hexadecimal number",
        "list as key",
    ],
)
def test_an_unusable_text_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        load_documents(text, "f.yaml")


def test_the_deepest_that_is_allowed() -> None:
    assert load_documents("a: " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1), "f")


def test_keys_are_texts_as_in_json() -> None:
    assert load_documents("5: 1\ntrue: 2\n2024-01-01: 3\nx: [{0x1: 4}]\n", "f") == [
        {"5": 1, "true": 2, "2024-01-01": 3, "x": [{"0x1": 4}]}
    ]


def test_documents_beside_one_of_no_use_are_returned() -> None:
    found = read_documents("a: 1\n---\nhello\n---\nb: 2\n---\nc: [1\n", "f")
    assert [str(document) for document in found] == [
        "{'a': 1}",
        "f: document 2 is a text, not a mapping; fix: begin with apiVersion, kind, metadata and spec",
        "{'b': 2}",
        "f: line 8: no valid YAML: expected ',' or ']', but got '<stream end>'",
    ]
