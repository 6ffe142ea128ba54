"""`llmtrain`, also installed as `kubectl-llmtrain`: validate a manifest, plan it, run it here, look at a job."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from llmtrain_api import __version__
from llmtrain_api.planning.machine import MACHINES
from llmtrain_operator.cli.say import UsageError, complain, escape_what_cannot_be_shown

DEFAULT_STATE = Path(".llmtrain")
WRONG_USAGE = 2
INTERRUPTED = 130


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    top = argparse.ArgumentParser(prog="llmtrain", description=__doc__)
    top.add_argument("--version", action="version", version=f"llmtrain {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_validate(commands)
    _add_plan(commands)
    _add_run(commands)
    _add_status(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 where it succeeded, 1 where it did not, 2 for wrong usage, 130 where the user stopped it."""
    options = parser().parse_args(arguments)
    escape_what_cannot_be_shown()
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    try:
        code = int(options.handler(options))
        sys.stdout.flush()
        return code
    except UsageError as error:
        complain(f"llmtrain {options.command}: {error}")
        return WRONG_USAGE
    except OSError as error:
        if error.filename is not None:  # about a file, so not from writing what we say
            raise
        if not isinstance(error, BrokenPipeError):
            complain(f"llmtrain {options.command}: standard output: {error.strerror}; write it where there is space")
        _abandon_output()
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _abandon_output() -> None:
    """Send what is still buffered nowhere: else the interpreter's own flush at the end complains."""
    with contextlib.suppress(OSError):  # a stream without a file, as tests have
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _handler(module: str, needs: str) -> Callable[[argparse.Namespace], int]:
    """Return a command that is imported when it is called: `validate` works where only the base is installed."""

    def handle(options: argparse.Namespace) -> int:
        try:
            command = importlib.import_module(f"llmtrain_operator.cli.{module}").command
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("llmtrain"):
                raise
            raise UsageError(f"the package {error.name} is not installed: pip install 'llmtrain[{needs}]'") from error
        return int(command(options))

    return handle


def _add_validate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("validate", help="show every error of manifests at once")
    command.add_argument("files", nargs="+", metavar="FILE", help="YAML or JSON; - reads standard input")
    command.set_defaults(handler=_handler("validate", "operator"))


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("plan", help="estimate memory and speed, and list the fastest layouts that fit")
    command.add_argument("file", metavar="FILE", help="YAML or JSON with one LLMTrainJob; - reads standard input")
    command.add_argument(
        "--machine",
        choices=sorted(MACHINES),
        default=None,
        help="what a rank computes on (default: parallelism.planFor; else cpu for a job without accelerators, or h100)",
    )
    command.add_argument("--top", type=_positive, default=10, metavar="N", help="layouts to show (default: 10)")
    command.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    command.add_argument(
        "--dry-run", action="store_true", help="lay the file's own layout out, rank by rank, without its machines"
    )
    command.set_defaults(handler=_handler("plan", "operator"))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a whole number, 1 or more")
    return int(text)


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("run", help="run a job with processes of this machine in place of pods")
    command.add_argument("file", metavar="FILE", help="YAML or JSON with one LLMTrainJob; - reads standard input")
    command.add_argument("--local", action="store_true", required=True, help="on this machine, without a cluster")
    _add_state(command)
    command.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="CLAIM=FOLDER",
        help="the folder that pvc://CLAIM means; repeatable (default: below the state folder)",
    )
    command.add_argument("--fresh", action="store_true", help="forget an earlier run of this name; checkpoints stay")
    command.set_defaults(handler=_handler("run", "operator,trainer"))


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("status", help="one screen: state, progress, loss, failures")
    command.add_argument("name", metavar="NAME", help="name of the job")
    command.add_argument("-n", "--namespace", default=None, help="default: that of the kubeconfig's context")
    command.add_argument("-w", "--watch", action="store_true", help="draw again until the job has ended")
    command.add_argument("--local", action="store_true", help="of a job started by `llmtrain run --local`")
    command.add_argument("--kubeconfig", default=None, metavar="FILE", help="default: $KUBECONFIG or ~/.kube/config")
    _add_state(command)
    command.set_defaults(handler=_handler("look", "operator"))


def _add_state(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--state", type=Path, default=DEFAULT_STATE, metavar="FOLDER", help="what local runs keep (default: .llmtrain)"
    )


if __name__ == "__main__":
    sys.exit(main())
