from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from llmtrain_api.constants import ExitCode
from llmtrain_api.spec import LLMTrainJobSpec
from llmtrain_api.sync import RankError
from llmtrain_trainer.errors import (
    CheckpointError,
    NumericsError,
    PeerLostError,
    StaleAttempt,
    UserError,
    describe,
    exit_code_of,
    write_error_file,
)


def _validation_error() -> Exception:
    try:
        LLMTrainJobSpec.model_validate({})
    except ValueError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("a.b", 1, "bad", allowed="2", fix="3"), ExitCode.USER_ERROR),
        (_validation_error(), ExitCode.USER_ERROR),
        (NumericsError("nan"), ExitCode.NUMERICS),
        (CheckpointError("disk"), ExitCode.CHECKPOINT),
        (StaleAttempt("newer"), ExitCode.STALE_ATTEMPT),
        (PeerLostError("gone"), ExitCode.PEER_LOST),
        (dist.DistBackendError("NCCL error"), ExitCode.PEER_LOST),
        (dist.DistNetworkError("reset"), ExitCode.PEER_LOST),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:3"), ExitCode.PEER_LOST),
        (RuntimeError("Timed out waiting 300000ms for recv operation to complete"), ExitCode.PEER_LOST),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), 1),
        (ValueError("Connection reset by peer"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(int(value)),
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_a_users_mistake_names_field_value_allowed_and_fix() -> None:
    error = UserError("model.vocabSize", 256, "too small", allowed="at least 257", fix="set it to 320")
    assert str(error) == "spec.model.vocabSize: 256: too small; allowed: at least 257; fix: set it to 320"


def test_the_error_file_is_what_the_agent_reads(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    try:
        raise CheckpointError("x" * 10_000)
    except CheckpointError as error:
        write_error_file(str(file), error)
        assert describe(error).traceback.endswith("x\n")
    read = RankError.model_validate(json.loads(file.read_text()))
    assert len(read.message) == 4096 and read.exception == "CheckpointError"
    assert [p.name for p in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize("path", ["", "/proc/llmtrain/error.json"])
def test_an_error_file_that_cannot_be_written_changes_nothing(path: str) -> None:
    write_error_file(path, ValueError("x"))
