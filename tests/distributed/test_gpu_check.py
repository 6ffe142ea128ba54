"""`make gpu-check` where there is no GPU: every check runs, small, so that it works on the day a GPU is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hack.gpu_check import __main__ as gpu_check
from hack.gpu_check.checks import CHECKS, Outcome, _difference
from hack.gpu_check.runs import Bench, RunError
from hack.gpu_check.sizes import TINY, Sizes, for_gpu
from llmtrain_api.spec_model import Model

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_passes_on_a_cpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu_check.main(["--device", "cpu", "--tiny", "--only", name])
    told = capsys.readouterr().out
    assert code == 0, told
    assert re.search(rf"^{name} +ok +[\d.]+ s  .*\d", told, re.MULTILINE), told
    if name == "speed":
        assert re.search(r"plain [\d,]+ tokens/s; transformers [\d,]+ tokens/s; torchtitan ", told), told


def test_without_a_gpu_one_line_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hack.gpu_check"],
        capture_output=True,
        text=True,
        check=True,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert len(done.stdout.splitlines()) == 1 and "no GPU" in done.stdout


def test_the_sizes_for_a_gpu_are_no_business_of_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gpu_check.main(["--device", "cpu"])
    assert "--tiny" in capsys.readouterr().err


def test_a_failed_check_fails_the_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: Bench, __: Sizes) -> Outcome:
        raise RunError("the process ended")

    monkeypatch.setattr(gpu_check, "CHECKS", {"good": lambda *_: Outcome(True, "1"), "bad": broken})
    assert gpu_check.check("cpu", TINY, ["good", "bad"]) == 1
    told = capsys.readouterr().out
    assert re.search(r"^bad +FAILED .*the process ended$", told, re.MULTILINE)
    assert "1 of 2 ok" in told and told.rstrip().endswith("bad FAILED")


def test_a_run_that_cannot_start_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"model\.heads"):
        Bench(tmp_path, "cpu").train("wrong", {**TINY.numerics, "heads": 7}, 1)


@pytest.mark.parametrize(("some", "off"), [([2.0, 1.1], 0.1), ([2.0, float("nan")], float("inf"))])
def test_losses_are_compared_by_their_largest_difference(some: list[float], off: float) -> None:
    assert _difference(some, [2.0, 1.0]) == pytest.approx(off)


@pytest.mark.parametrize(("gigabytes", "billions"), [(24, 0.3), (80, 1.5), (141, 1.5)])
def test_the_model_whose_speed_is_taken_fits_the_gpu(gigabytes: int, billions: float) -> None:
    dims = Model.model_validate(for_gpu(int(gigabytes * 1e9)).speed).dimensions()
    assert dims.parameter_count() == pytest.approx(billions * 1e9, rel=0.2)
    logits = 12 * for_gpu(int(gigabytes * 1e9)).speed_batch * dims.sequence_length * dims.vocab_size
    assert 20 * dims.parameter_count() + logits < 0.7 * gigabytes * 1e9, "room for activations"


def test_the_largest_checkpoint_fits_an_ordinary_disk() -> None:
    sizes = for_gpu(int(80e9))
    assert 12 * Model.model_validate(sizes.checkpoint).dimensions().parameter_count() < 2e9
    assert not torch.cuda.is_initialized(), "sizes are chosen without touching a GPU"
