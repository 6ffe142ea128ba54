"""What one rank does, from its launch document to its exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys

import torch

from llmtrain_api.constants import ExitCode
from llmtrain_api.launch import RankLaunch
from llmtrain_trainer import distributed
from llmtrain_trainer.config import RunConfig
from llmtrain_trainer.errors import exit_code_of, write_error_file
from llmtrain_trainer.heartbeat import Heartbeat, dump_stacks_at_signal
from llmtrain_trainer.train import StartPhases, Trainer

log = logging.getLogger(__name__)


def run(launch: RankLaunch) -> int:
    """Run one rank in this process and return its exit code. The caller ends the process by os._exit.

    After a failure the process group is left as it is: with a peer gone, destroying it may block, and gloo's threads
    do not survive a normal exit of the interpreter anyway. A failure is described in launch.error_file.
    """
    _prepare_process(launch)
    try:
        if launch.stacks_file:
            dump_stacks_at_signal(launch.stacks_file)  # before the first beat, after which the agent may ask
        phases = StartPhases(Heartbeat(launch.beat_file))
        with phases.phase("config"):
            config = RunConfig.of(launch)
        with phases.phase("rendezvous"):
            ranks = distributed.join(config)
        trainer = Trainer(config, ranks, phases)
        code: int = trainer.train()
        trainer.reporter.close()
        distributed.leave(ranks)
    except BaseException as error:
        code = exit_code_of(error)
        write_error_file(launch.error_file, error)
        if code == 1:
            log.exception("rank %d crashed", launch.global_rank)
        else:
            log.error("%s: %s", ExitCode(code).name, error)
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code)


def _prepare_process(launch: RankLaunch) -> None:
    """Set what a fork-server's child inherits wrongly: signals, threads, log prefix."""
    signal.set_wakeup_fd(-1)  # the number may by now belong to another file
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD})
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    form = f"%(asctime)s rank {launch.global_rank} attempt {launch.attempt} %(levelname)s %(message)s"
    logging.basicConfig(level=logging.WARNING, format=form, stream=sys.stderr, force=True)
