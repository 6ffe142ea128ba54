"""The bytes of an apply: whatever text is in it, a YAML reader takes them and reads the same."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from llmtrain_operator.kube.wire import apply_body

AWKWARD = [
    "\U0001f600",
    "a\x00b",
    "\x1b[31mred\x1b[0m",
    "\x7f\x85",
    "\u2028\u2029",
    "\ufeff",
    "\ufffe\uffff",
    "\\ud83d",
    '"\\u12',
    "\xe9",
    "- a: b",
]


def by_yaml(body: bytes) -> object:
    """Read it as libyaml does, which the API server's reader is a port of."""
    return yaml.load(body, yaml.CSafeLoader)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20), st.text() | st.sampled_from(AWKWARD) | st.integers() | st.booleans()
    )
)
def test_yaml_and_json_read_the_same_whatever_the_text_is(body: dict[str, object]) -> None:
    sent = apply_body(body)
    assert json.loads(sent) == body
    assert by_yaml(sent) == body


@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_text_arrives_as_it_is(text: str) -> None:
    assert by_yaml(apply_body({"message": text})) == {"message": text}


def test_half_a_surrogate_pair_becomes_a_replacement_character() -> None:
    assert by_yaml(apply_body({"message": "a\ud83db\udc80"})) == {"message": "a\ufffdb\ufffd"}
