"""What the agent is told by its environment (llmtrain_api.constants.Env), checked as a whole."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from llmtrain_api.constants import Env

RANK_ENTRY = "LLMTRAIN_RANK_ENTRY"
"""For developers of the agent: `module:function` to run as a rank; it takes a RankLaunch and returns the exit code."""
DEFAULT_RANK_ENTRY = "llmtrain_trainer.rank:run"


class SettingsError(Exception):
    """The environment is wrong; the message has one line per variable."""


@dataclass(frozen=True)
class Settings:
    coordinator_url: str
    """Without a trailing slash."""
    token_file: Path
    job_namespace: str
    job_name: str
    job_uid: str
    pod_name: str
    pod_address: str
    worker_index: int
    grace_seconds: float = 30.0
    """Kubernetes' own default of terminationGracePeriodSeconds."""
    orphan_seconds: float = 0.0
    """0: wait for the coordinator for ever."""
    fence_seconds: float = 15.0
    """Without a word from the coordinator, ranks that are stuck this long are killed; 0: never."""
    work_dir: Path = Path("/tmp/llmtrain")
    volumes: Mapping[str, str] = field(default_factory=dict)
    rank_entry: str = DEFAULT_RANK_ENTRY

    @property
    def run_name(self) -> str:
        return f"{self.job_namespace}/{self.job_name}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read and check every variable; an empty one counts as not set.

        Raises:
            SettingsError: at least one is missing or wrong; all of them are named.
        """
        values: dict[str, Any] = {}
        problems: list[str] = []
        for variable in _VARIABLES:
            text = environment.get(variable.name, "")
            if text:
                try:
                    values[variable.attribute] = variable.parse(text)
                except ValueError:
                    problems.append(f"{variable.name} is {text!r}: it must be {variable.allowed}")
            elif variable.required:
                problems.append(f"{variable.name} is not set: it must be {variable.allowed}")
        if problems:
            raise SettingsError("\n".join(problems))
        return cls(**values)


def _url(text: str) -> str:
    parts = urlsplit(text)
    # Looking at the port raises ValueError where it is none.
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0 or parts.query or parts.fragment:
        raise ValueError(text)
    return text.rstrip("/")


def _index(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _volumes(text: str) -> dict[str, str]:
    value = json.loads(text)
    if not isinstance(value, dict) or not all(isinstance(folder, str) for folder in value.values()):
        raise ValueError(text)
    return value


def _entry(text: str) -> str:
    module, _, function = text.partition(":")
    if not module or not function:
        raise ValueError(text)
    return text


class _Variable(NamedTuple):
    name: str
    attribute: str
    parse: Callable[[str], Any]
    allowed: str
    required: bool = True


_VARIABLES = (
    _Variable(Env.COORDINATOR_URL, "coordinator_url", _url, "http://HOST:PORT of the coordinator"),
    _Variable(Env.TOKEN_FILE, "token_file", Path, "the path of the file with the job's token"),
    _Variable(Env.JOB_NAMESPACE, "job_namespace", str, "the job's namespace"),
    _Variable(Env.JOB_NAME, "job_name", str, "the job's name"),
    _Variable(Env.JOB_UID, "job_uid", str, "the job's uid"),
    _Variable(Env.POD_NAME, "pod_name", str, "the name of this worker"),
    _Variable(Env.POD_ADDRESS, "pod_address", str, "the address at which other workers reach this one"),
    _Variable(Env.WORKER_INDEX, "worker_index", _index, "a whole number from 0"),
    _Variable(Env.GRACE_SECONDS, "grace_seconds", _seconds, "seconds from 0", required=False),
    _Variable(Env.ORPHAN_SECONDS, "orphan_seconds", _seconds, "seconds from 0", required=False),
    _Variable(Env.FENCE_SECONDS, "fence_seconds", _seconds, "seconds from 0", required=False),
    _Variable(Env.WORK_DIR, "work_dir", Path, "a folder that can be written", required=False),
    _Variable(Env.VOLUMES, "volumes", _volumes, 'JSON such as {"claim": "/folder"}', required=False),
    _Variable(RANK_ENTRY, "rank_entry", _entry, "module:function", required=False),
)
