"""Messages survive any cutting of the stream, and a stream out of step is noticed."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmtrain_trainer.agent.frames import MAX_FRAME_BYTES, Decoder, encode

MESSAGES = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=40) | st.integers(), max_size=4), max_size=5)


@given(MESSAGES, st.lists(st.integers(1, 30), max_size=40))
def test_messages_arrive_whole_however_the_stream_is_cut(messages: list[dict[str, object]], cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in messages)
    decoder, received = Decoder(), []
    for cut in [*cuts, len(stream)]:
        piece, stream = stream[:cut], stream[cut:]
        received += decoder.feed(piece)
    assert received == messages


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack(">I", MAX_FRAME_BYTES + 1), id="impossible length"),
        pytest.param(struct.pack(">I", 2) + b"[]", id="no object"),
        pytest.param(struct.pack(">I", 1) + b"{", id="no JSON"),
    ],
)
def test_stream_out_of_step_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        list(Decoder().feed(data))
