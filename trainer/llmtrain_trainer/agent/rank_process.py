"""The first and last moments of a rank: from the fork to its entry function, and from there to its exit code."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from llmtrain_api.launch import RankLaunch
from llmtrain_trainer.agent import linux
from llmtrain_trainer.agent.launch import LAUNCH_VARIABLE

RankEntry = Callable[[RankLaunch], int]


def load_entry(name: str) -> RankEntry:
    """Import `module:function`."""
    module, _, function = name.partition(":")
    entry: RankEntry = getattr(importlib.import_module(module), function)
    return entry


def become_rank(start: dict[str, Any], entry_name: str, parent: int) -> NoReturn:
    """Turn this just forked child into a rank, run it, and exit with its code. Never returns, never raises."""
    code = 1
    try:
        code = _run(start, entry_name, parent)
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = code or 1  # what the rank said is lost
        # Not sys.exit: torch's threads make an orderly end of the interpreter abort now and then.
        os._exit(code & 255)


def _isolate(start: dict[str, Any], parent: int) -> None:
    """Give the child a session, a name, default signals and the environment of its rank."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if signal.getsignal(number) not in (signal.SIG_DFL, None) and number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as in every Python program: a write raises
    os.setsid()
    linux.die_with_parent(parent)
    linux.set_process_name(start["name"])
    os.environ.update(start["environment"])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _run(start: dict[str, Any], entry_name: str, parent: int) -> int:
    error_file = Path(start["errorFile"])
    try:
        _isolate(start, parent)
        launch = RankLaunch.model_validate_json(os.environ[LAUNCH_VARIABLE])
        return load_entry(entry_name)(launch)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exc()
        if not error_file.exists():  # else the rank has told more than we can
            _write_error(error_file, error)
        return 1


def _write_error(error_file: Path, error: BaseException) -> None:
    record = {
        "message": f"{type(error).__name__}: {error}"[:4096],
        "exception": type(error).__name__[:256],
        "traceback": traceback.format_exc()[-16384:],
        "time": time.time(),
    }
    temporary = error_file.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(record))
        temporary.rename(error_file)
    except OSError:
        traceback.print_exc()
