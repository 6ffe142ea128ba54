"""What a platform engineer decides for one operator: flags of `llmtrain-operator`, each with a variable."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from llmtrain_api.constants import COORDINATOR_PORT, METRICS_PORT
from llmtrain_operator.coordinator.token import MIN_KEY_BYTES
from llmtrain_operator.core.observed import Policy

ENV_PREFIX = "LLMTRAIN_OPERATOR_"


class SettingsError(Exception):
    """A setting is missing or impossible; the message names it and the fix."""


@dataclass(frozen=True)
class OperatorSettings:
    """Every field is a flag (`--key-file`) and a variable (LLMTRAIN_OPERATOR_KEY_FILE) of the same name."""

    coordinator_url: str
    """Base address of the coordinator as worker pods reach it, for instance http://llmtrain.llmtrain-system:8470 ."""
    key_file: Path
    """File with at least 32 random bytes: makes the jobs' tokens. The same after a restart, or agents are refused."""
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; none: all."""
    coordinator_host: str = ""
    """Address to listen on; empty: all."""
    coordinator_port: int = COORDINATOR_PORT
    metrics_host: str = ""
    metrics_port: int = METRICS_PORT
    """Port of /metrics, /healthz and /readyz."""
    lease_name: str = "llmtrain-operator"
    lease_namespace: str = "default"
    """Namespace of the lease; default: POD_NAMESPACE."""
    lease_duration_seconds: float = 6.0
    """How long a successor waits when an operator vanished without a word."""
    identity: str = field(default_factory=socket.gethostname)
    """Name of this operator's pod; default: POD_NAME, else the host name."""
    workers: int = 8
    """Jobs looked at at the same time."""
    resync_seconds: float = 300.0
    """Time between looks at everything although nothing was told."""
    image_pull_policy: str = ""
    """Of worker pods; empty: Kubernetes' own default."""
    log_format: str = "json"
    """json | text"""
    log_level: str = "INFO"
    job_metrics: bool = False
    """Add metrics with the namespace and name of each running job."""
    policy: Policy = field(default_factory=Policy)

    def key(self) -> bytes:
        """Return the key.

        Raises:
            SettingsError: the file cannot be read or holds too little.
        """
        try:
            key = self.key_file.read_bytes()
        except OSError as error:
            problem = f"--key-file {self.key_file}: {error.strerror}. Fix: mount the operator's key there"
            raise SettingsError(problem) from error
        if len(key) < MIN_KEY_BYTES:
            raise SettingsError(
                f"--key-file {self.key_file} holds {len(key)} bytes; at least {MIN_KEY_BYTES} are needed. "
                "Fix: fill it from a random source"
            )
        return key


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> OperatorSettings:
    """Return the settings; a flag wins over its variable.

    Raises:
        SettingsError: something is missing or impossible.
    """
    given = _parser(environment).parse_args(arguments)
    if not given.coordinator_url.startswith(("http://", "https://")):
        raise SettingsError(
            f"--coordinator-url is {given.coordinator_url!r}. Fix: give the http:// address of the operator's Service"
        )
    if given.workers < 1 or given.resync_seconds <= 0 or given.lease_duration_seconds < 1:
        raise SettingsError(
            "--workers must be at least 1, --resync-seconds above 0, --lease-duration-seconds at least 1"
        )
    return OperatorSettings(
        coordinator_url=given.coordinator_url.rstrip("/"),
        key_file=Path(given.key_file),
        namespaces=tuple(sorted({name.strip() for name in given.namespaces.split(",") if name.strip()})),
        coordinator_host=given.coordinator_host,
        coordinator_port=given.coordinator_port,
        metrics_host=given.metrics_host,
        metrics_port=given.metrics_port,
        lease_name=given.lease_name,
        lease_namespace=given.lease_namespace,
        lease_duration_seconds=given.lease_duration_seconds,
        identity=given.identity,
        workers=given.workers,
        resync_seconds=given.resync_seconds,
        image_pull_policy=given.image_pull_policy,
        log_format=given.log_format,
        log_level=given.log_level,
        job_metrics=given.job_metrics == "true",
        policy=Policy(
            status_period_seconds=given.status_period_seconds,
            settle_seconds=given.settle_seconds,
            agent_lost_seconds=given.agent_lost_seconds,
            accelerator_hour_price=given.accelerator_hour_price,
        ),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="llmtrain-operator", description="Runs LLMTrainJobs on this cluster.")
    defaults, policy = OperatorSettings("", Path()), Policy()

    def add(name: str, fallback: object, **options: Any) -> None:
        variable = ENV_PREFIX + name.upper()
        value = environment.get(variable, fallback)
        choices = options.get("choices")
        if choices and value not in choices:  # argparse checks flags only
            parser.error(f"{variable} is {value!r}. Fix: give one of {', '.join(choices)}")
        required = fallback is None and value is None
        parser.add_argument("--" + name.replace("_", "-"), default=value, required=required, **options)

    add("coordinator_url", None)
    add("key_file", None)
    add("namespaces", "", help="comma-separated; empty: all")
    for name in ("coordinator_host", "metrics_host", "lease_name", "image_pull_policy"):
        add(name, getattr(defaults, name))
    add("lease_namespace", environment.get("POD_NAMESPACE", defaults.lease_namespace))
    add("identity", environment.get("POD_NAME", defaults.identity))
    for name in ("coordinator_port", "metrics_port", "workers"):
        add(name, getattr(defaults, name), type=int)
    for name in ("lease_duration_seconds", "resync_seconds"):
        add(name, getattr(defaults, name), type=float)
    for name in ("status_period_seconds", "settle_seconds", "agent_lost_seconds", "accelerator_hour_price"):
        add(name, getattr(policy, name), type=float)
    add("log_format", defaults.log_format, choices=("json", "text"))
    add("log_level", defaults.log_level, choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    add("job_metrics", "false", choices=("true", "false"))
    return parser
