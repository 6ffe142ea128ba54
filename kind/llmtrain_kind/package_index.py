"""uv does not read pip's configuration, and a machine may have only that: hand the package index on to uv."""

import os
import subprocess
import sys

_UV_SETTINGS = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")


def uv_environment() -> dict[str, str]:
    """This process's environment for uv, with pip's index and certificates where uv has none of its own."""
    environment = dict(os.environ)
    if not any(environment.get(name) for name in _UV_SETTINGS):
        index = environment.get("PIP_INDEX_URL") or _pip_setting("global.index-url")
        if index:
            environment["UV_DEFAULT_INDEX"] = index
    if not environment.get("SSL_CERT_FILE"):
        certificates = environment.get("PIP_CERT") or _pip_setting("global.cert")
        if certificates:
            environment["SSL_CERT_FILE"] = certificates
    return environment


def _pip_setting(name: str) -> str:
    """What pip's configuration files say; empty where they say nothing or there is no pip."""
    # The environment that uv keeps in step with constraints.txt has no pip; the Python that it was made from has.
    for python in dict.fromkeys((sys.executable, getattr(sys, "_base_executable", sys.executable))):
        command = [python, "-m", "pip", "config", "get", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return ""
