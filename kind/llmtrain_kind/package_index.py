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
    # `list`, because `get` of some versions finds nothing in the file that PIP_CONFIG_FILE names.
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [line.partition("=")[2] for line in done.stdout.splitlines() if line.startswith(f"{name}=")]
    return found[-1].strip("'\"") if found else ""
