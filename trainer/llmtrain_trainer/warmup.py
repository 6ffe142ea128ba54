"""What a fork-server must import so that a rank forked from it imports nothing more.

torch imports about 300 modules only when FSDP2 or a checkpoint first needs them: four seconds in every rank. Which they
are is found by a throw-away process that takes one step, saves and loads; the list is kept, by content of this package
and versions of Python and torch, in the image (`python -m llmtrain_trainer.warmup --bake`) or in the user's cache.

    python -m llmtrain_trainer.warmup          take the step and print the list with its key, as kept in files
    python -m llmtrain_trainer.warmup --bake   and keep it beside the package, for everyone who starts from this image
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
BAKED = PACKAGE / "warm_modules.json"
LEARN_SECONDS = 300
NOT_TO_IMPORT = ("__main__", "__mp_main__", "llmtrain_trainer.warmup", "llmtrain_trainer.agent")
BASE = "llmtrain_trainer.rank"


def modules_after_one_step() -> list[str]:
    """Return the modules that a rank uses, in the order in which they can be imported.

    Known ones are read from a file; else a child process finds them, while this process imports what is certain.
    Starts no thread, opens no process group and touches no GPU in the calling process.

    Raises:
        RuntimeError: the child could not take its step; the text says why.
    """
    key = _key()
    for file in (BAKED, _cache_file(key)):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            held = json.loads(file.read_text(encoding="utf-8"))
            if held["key"] == key:
                return [str(name) for name in held["modules"]]
    modules = _learn()
    with contextlib.suppress(OSError):
        _keep(_cache_file(key), key, modules)
    return modules


def warm() -> list[str]:
    """Import all of them into this process; return those that refused (harmless: a rank will import what it needs)."""
    refused = []
    for name in modules_after_one_step():
        try:
            importlib.import_module(name)
        except Exception:
            refused.append(name)
    return refused


def _learn() -> list[str]:
    command = [sys.executable, "-m", "llmtrain_trainer.warmup"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        importlib.import_module(BASE)  # in the meantime, on another core
        try:
            out, err = child.communicate(timeout=LEARN_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            raise RuntimeError(f"the warm-up step took more than {LEARN_SECONDS} s") from None
    if child.returncode:
        raise RuntimeError(f"the warm-up step failed with exit code {child.returncode}: {err[-2000:]}")
    return [str(name) for name in json.loads(out.splitlines()[-1])["modules"]]


def _key() -> str:
    """Name this state of the code: content of the package, Python, torch."""
    digest = hashlib.sha256(f"{sys.version} {importlib.metadata.version('torch')}".encode())
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.parent.name != "agent":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _cache_file(key: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache")
    return Path(base, "llmtrain", f"warm-{key[:16]}.json")


def _keep(file: Path, key: str, modules: list[str]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"key": key, "modules": modules}), encoding="utf-8")
    os.replace(temporary, file)


def _take_one_step() -> list[str]:
    """Train one step at world size 1, save, and load it again; return what has been imported by then."""
    with tempfile.TemporaryDirectory(prefix="llmtrain-warm-") as folder:
        Path(folder, "data.txt").write_text("What a rank needs is known after one step. " * 20, encoding="utf-8")
        os.environ["LLMTRAIN_WORK_DIR"] = folder
        before = set(sys.modules)
        from llmtrain_api.launch import RankLaunch
        from llmtrain_trainer.rank import run

        for attempt in (1, 2):  # the second loads what the first saved
            code = run(RankLaunch.model_validate(_launch(folder, attempt)))
            if code:
                raise RuntimeError(f"exit code {code}: {Path(folder, 'error').read_text(encoding='utf-8')}")
    modules = [name for name in sys.modules if name not in before]
    return [name for name in modules if not name.startswith(NOT_TO_IMPORT)]


def _launch(folder: str, attempt: int) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = {
        "workers": {"image": "none", "accelerator": {"count": 0}, "device": "cpu"},
        "model": {"preset": "tiny"},
        "training": {"steps": attempt, "globalBatchSize": 1, "precision": "bf16"},
        "data": {"sources": [{"uri": f"file://{folder}/data.txt"}]},
        "checkpoint": {"store": f"file://{folder}/store"},
    }
    place = {"globalRank": 0, "localRank": 0, "nodeRank": 0, "worldSize": 1, "localWorldSize": 1}
    address = {"masterAddress": "127.0.0.1", "masterPort": port, "errorFile": f"{folder}/error"}
    return {"runId": "warm/up", "attempt": attempt, "spec": spec, **place, **address}


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with contextlib.redirect_stdout(sys.stderr):
        modules = _take_one_step()
    if "--bake" in sys.argv:
        _keep(BAKED, _key(), modules)
    print(json.dumps({"key": _key(), "modules": modules}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
