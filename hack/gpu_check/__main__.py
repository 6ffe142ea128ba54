"""`make gpu-check`: in under five minutes on one GPU, what no CPU can check of the trainer.

    .venv/bin/python -m hack.gpu_check [--only CHECK ...]
    .venv/bin/python -m hack.gpu_check --device cpu --tiny       every check, small, where there is no GPU

Exit code 0: all is well, or there is no GPU, which is said; 1: a check failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from hack.gpu_check.checks import CHECKS, Outcome
from hack.gpu_check.runs import Bench, RunError
from hack.gpu_check.sizes import TINY, Sizes, for_gpu


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack.gpu_check", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes; speed is told, not judged")
    parser.add_argument("--only", action="append", choices=tuple(CHECKS), help="a check to make; repeatable")
    options = parser.parse_args(arguments)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: the sizes for a GPU would take a CPU hours")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: nothing checked, torch finds no GPU here; ARGS='--device cpu --tiny' tries the checks")
        return 0
    return check(options.device, _sizes(options.device, tiny=options.tiny), options.only or list(CHECKS))


def check(device: str, sizes: Sizes, names: list[str]) -> int:
    """Make some checks, and print a line for each."""
    started = time.monotonic()
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"gpu-check on {where}, torch {torch.__version__}{', tiny' if sizes.tiny else ''}", flush=True)
    failed = []
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        bench = Bench(Path(folder), device)
        for name in names:
            begun = time.monotonic()
            outcome = _outcome(name, bench, sizes)
            verdict = "ok" if outcome.ok else "FAILED"
            print(f"{name:<11} {verdict:<7} {time.monotonic() - begun:5.1f} s  {outcome.figures}", flush=True)
            failed += [] if outcome.ok else [name]
    seconds = time.monotonic() - started
    print(
        f"gpu-check: {len(names) - len(failed)} of {len(names)} ok in {seconds:.0f} s"
        + "".join(f", {n} FAILED" for n in failed)
    )
    return 1 if failed else 0


def _outcome(name: str, bench: Bench, sizes: Sizes) -> Outcome:
    try:
        return CHECKS[name](bench, sizes)
    except RunError as error:
        return Outcome(False, str(error))


def _sizes(device: str, *, tiny: bool) -> Sizes:
    if tiny:
        return TINY
    return for_gpu(torch.cuda.get_device_properties(device).total_memory)


if __name__ == "__main__":
    sys.exit(main())
