"""A machine whose package index is named by pip's configuration alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmtrain_kind.package_index import uv_environment

PIP, UV = "https://pip.invalid/simple", "https://uv.invalid/simple"


@pytest.mark.parametrize(
    ("variables", "pip_file", "index", "certificates"),
    [
        ({}, "", None, None),
        ({}, f"[global]\nindex-url = {PIP}\ncert = /own.crt\n", PIP, "/own.crt"),
        ({"PIP_INDEX_URL": PIP, "PIP_CERT": "/own.crt"}, "", PIP, "/own.crt"),
        ({"UV_DEFAULT_INDEX": UV, "PIP_INDEX_URL": PIP}, "", UV, None),
        (
            {"UV_INDEX_URL": UV, "SSL_CERT_FILE": "/uv.crt"},
            f"[global]\nindex-url = {PIP}\ncert = /a\n",
            None,
            "/uv.crt",
        ),
    ],
    ids=["nothing said", "pip.conf", "pip's variables", "uv's own index wins", "uv's older name and its certificates"],
)
def test_uv_hears_of_the_index_that_pip_knows(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    variables: dict[str, str],
    pip_file: str,
    index: str | None,
    certificates: str | None,
) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(pip_file)
    used = config if pip_file else os.devnull  # by which pip is told to read no file at all, the machine's neither
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "PIP_CERT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PIP_CONFIG_FILE": str(used), **variables}.items():
        monkeypatch.setenv(name, value)
    environment = uv_environment()
    assert environment.get("UV_DEFAULT_INDEX") == index
    assert environment.get("SSL_CERT_FILE") == certificates
