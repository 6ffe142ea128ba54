"""The bearer token of a job: it proves that a request comes from one of that job's own workers."""

from __future__ import annotations

import hashlib
import hmac

MIN_KEY_BYTES = 32


def job_token(key: bytes, job_uid: str) -> str:
    """Return HMAC-SHA256(key, uid) in hex: it needs no storage, survives restarts, and dies with the job's uid.

    Raises:
        ValueError: the key is too short to be a secret, or the uid is empty (that token would fit any such job).
    """
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"the operator's key has {len(key)} bytes: at least {MIN_KEY_BYTES} random bytes are needed")
    if not job_uid:
        raise ValueError("a job without a uid has no token")
    return hmac.new(key, job_uid.encode(), hashlib.sha256).hexdigest()


def token_matches(key: bytes, job_uid: str, presented: str) -> bool:
    """Say whether the token is that of the job, in a time that does not depend on where the two differ."""
    expected = job_token(key, job_uid).encode()
    return hmac.compare_digest(expected, presented.encode("utf-8", "surrogateescape"))
