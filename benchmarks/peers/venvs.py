"""Environments of peers: each in its own, so that no peer's wishes decide over another's versions."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

CACHE = Path.home() / ".cache" / "llmtrain" / "peers"
UV = Path(sys.executable).parent / "uv"


def python_of(name: str) -> str:
    """Return the interpreter of a peer's environment, which is made on first use; "" stands for our own.

    Raises:
        subprocess.CalledProcessError: an installation failed; pip's or uv's own message stands above.
    """
    if not name:
        return sys.executable
    wanted = Path(__file__).parent / f"requirements-{name}.txt"
    folder, stamp = CACHE / name, CACHE / name / "stamp"
    mark = hashlib.sha256(wanted.read_bytes() + sys.version.encode()).hexdigest()
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text() != mark:
        print(f"making {folder} from {wanted.name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(UV), "pip"] if UV.exists() else [str(python), "-m", "pip"]
        own = ["--python", str(python)] if UV.exists() else []
        subprocess.run([*install, "install", "--quiet", *own, "-r", str(wanted)], check=True)
        stamp.write_text(mark)
    return str(python)
