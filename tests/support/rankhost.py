"""A process that has imported what ranks need and forks them on request: a test's ranks start in tenths of a second.

One JSON request per line of input, one JSON answer per line of output:

    {"start": [{"launch": RankLaunch, "log": FILE, "environment": {}, "max_file_bytes": null}]} -> {"pids": [...]}
    {"poll": [pid]}                                                       -> {"ended": {pid: exit code, or -signal}}

It stays at one thread, as the agent's fork-server must. It leaves, and its ranks with it, when its input closes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1


def serve() -> None:
    from llmtrain_trainer.warmup import warm

    refused = warm()
    gc.freeze()
    print(json.dumps({"refused": refused, "threads": len(os.listdir("/proc/self/task"))}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            answer: dict[str, Any] = {"pids": [fork(rank) for rank in request["start"]]}
        else:
            answer = {"ended": {pid: code for pid in request["poll"] if (code := ended(pid)) is not None}}
        print(json.dumps(answer), flush=True)


def fork(rank: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = become(rank)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def become(rank: dict[str, Any]) -> int:
    from llmtrain_api.launch import RankLaunch
    from llmtrain_trainer.rank import run

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, handle in enumerate((null, log, log)):
        os.dup2(handle, number)
    os.environ.update(rank["environment"])
    if rank["max_file_bytes"] is not None:
        # The soft limit alone, so that it can be lifted while the rank runs.
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (rank["max_file_bytes"], hard))
    return run(RankLaunch.model_validate(rank["launch"]))


def ended(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    serve()
    sys.stdout.flush()
    os._exit(0)
