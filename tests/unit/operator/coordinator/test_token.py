"""The bearer token of a job."""

from __future__ import annotations

import pytest

from llmtrain_operator.coordinator.token import job_token, token_matches

KEY = bytes(range(32))


def test_a_token_is_the_same_after_a_restart_and_fits_its_job_alone() -> None:
    token = job_token(KEY, "uid-1")
    assert token == job_token(KEY, "uid-1")
    assert token_matches(KEY, "uid-1", token)
    assert not token_matches(KEY, "uid-2", token)
    assert not token_matches(bytes(32), "uid-1", token)


@pytest.mark.parametrize("presented", ["", "x", "\udcff", "\u00e9" * 64, "0" * 64])
def test_other_text_never_matches_and_never_raises(presented: str) -> None:
    assert not token_matches(KEY, "uid-1", presented)


@pytest.mark.parametrize(("key", "uid"), [(b"short", "uid-1"), (KEY, "")], ids=["short key", "no uid"])
def test_a_weak_token_is_refused(key: bytes, uid: str) -> None:
    with pytest.raises(ValueError):
        job_token(key, uid)
