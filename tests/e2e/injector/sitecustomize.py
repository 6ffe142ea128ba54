"""Faults from inside a rank, as a user's own code makes them. No part of the product: a job gets it by PYTHONPATH.

Each forked rank polls the folder beside this file for `rank-N`, whose words are an order, taken once: `exit 64` leaves
with that code, `fill-memory` allocates until somebody ends it, `poison` sets a weight to NaN as a broken device does.
"""

import gc
import mmap
import os
import threading
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PERIOD_SECONDS = 0.05
CHUNK_BYTES = 64 << 20


def _watch() -> None:
    while True:
        time.sleep(PERIOD_SECONDS)
        name = Path("/proc/self/comm").read_text().strip()
        taken = FOLDER / f"taken-{os.getpid()}-{name}"
        try:
            (FOLDER / name.replace("ltrank-", "rank-")).rename(taken)
        except OSError:
            continue
        word, _, argument = taken.read_text().partition(" ")
        taken.write_text(str(time.time()))
        _obey(word, argument)


def _obey(word: str, argument: str) -> None:
    if word == "exit":
        os._exit(int(argument))
    if word == "fill-memory":
        held = []
        while True:
            held.append(mmap.mmap(-1, CHUNK_BYTES))
            held[-1].write(b"\1" * CHUNK_BYTES)
    if word == "poison":
        import torch

        models = [thing for thing in gc.get_objects() if isinstance(thing, torch.nn.Module)]
        with torch.no_grad():
            next(p for model in models for p in model.parameters()).fill_(float("nan"))


def _begin() -> None:
    threading.Thread(target=_watch, name="faults", daemon=True).start()


os.register_at_fork(after_in_child=_begin)
