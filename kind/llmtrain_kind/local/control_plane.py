"""The control plane: etcd, API server, controller manager, scheduler and DNS, as processes on the host."""

import time
from collections.abc import Callable
from pathlib import Path

from llmtrain_kind import processes
from llmtrain_kind.errors import ClusterError
from llmtrain_kind.feature_gates import as_flag, gates, runtime_config
from llmtrain_kind.local import configs
from llmtrain_kind.local.api import Api, ApiError, ApiUnavailable
from llmtrain_kind.local.layout import DNS_DOMAIN, Layout
from llmtrain_kind.shell import last_lines

#: In the order in which they start.
COMPONENTS = ("etcd", "apiserver", "controller-manager", "scheduler", "coredns")

#: What `node control-plane kill` ends. The controllers go with the API server as on a real control plane, where they
#: lose their leader lease and start anew: one that slept through an outage would take every node for dead at its end.
SERVING = ("scheduler", "controller-manager", "apiserver")

_START_SECONDS = 120.0


def write_configs(layout: Layout) -> None:
    """Write what the components read; the certificates must be there."""
    for user in ("admin", "controller-manager", "scheduler", "proxy", "coredns", *(n.name for n in layout.nodes)):
        configs.write(layout.kubeconfig(user), configs.kubeconfig(layout, user))
    configs.write(layout.state / "Corefile", configs.corefile(layout))
    configs.write(layout.state / "audit-policy.json", configs.audit_policy())


def command(layout: Layout, component: str) -> list[str | Path]:
    """The command line of one component."""
    arguments = {
        "etcd": _etcd,
        "apiserver": _apiserver,
        "controller-manager": _controller_manager,
        "scheduler": _scheduler,
        "coredns": _coredns,
    }[component](layout)
    program = component if component in ("etcd", "coredns") else f"kube-{component}"
    return [layout.programs / program, *arguments]


def start(layout: Layout, component: str, lock: int) -> None:
    """Start a component unless it runs."""
    record = layout.record(component)
    running = processes.read_record(record)
    if running is None or not running.alive():
        processes.start(command(layout, component), record, layout.log(component), lock, {})


def start_api(layout: Layout, lock: int) -> None:
    """Start etcd and the API server and wait until the latter is ready."""
    start(layout, "etcd", lock)
    start(layout, "apiserver", lock)
    api = Api(layout)
    wait(layout, "the API server to be ready", ("etcd", "apiserver"), api.ready)


def start_rest(layout: Layout, lock: int) -> None:
    """Start the controllers and DNS once the API server is ready."""
    for component in ("controller-manager", "scheduler"):
        start(layout, component, lock)
    api = Api(layout)
    for path, manifest in configs.dns_permissions():
        api.apply(path, manifest)
    start(layout, "coredns", lock)


def wait(layout: Layout, what: str, components: tuple[str, ...], condition: Callable[[], bool]) -> None:
    """Wait until ``condition`` holds; raise ClusterError with the log of the first component that dies meanwhile.

    ``components`` are the names of the records of the processes that the condition depends on.
    """
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            if condition():
                return
            reason = ""
        except (ApiError, ApiUnavailable) as error:
            reason = f" ({error})"
        for component in components:
            process = processes.read_record(layout.record(component))
            if process is None or not process.alive():
                raise ClusterError(f"{component} has ended while waiting for {what}\n{_log_excerpt(layout, component)}")
        if time.monotonic() > deadline:
            logs = "\n".join(_log_excerpt(layout, component) for component in components)
            raise ClusterError(f"gave up waiting for {what} after {_START_SECONDS:.0f} s{reason}\n{logs}")
        time.sleep(0.05)


def _log_excerpt(layout: Layout, component: str) -> str:
    log = layout.log(component)
    return f"  the last lines of {log}:\n{last_lines(log)}"


def _coredns(layout: Layout) -> list[str]:
    return [f"-conf={layout.state / 'Corefile'}"]


def _etcd(layout: Layout) -> list[str]:
    client, peer = f"https://{layout.loopback}:2379", f"http://{layout.loopback}:2380"
    tls = ["--client-cert-auth", f"--trusted-ca-file={layout.pki / 'ca.crt'}"]
    return [
        f"--data-dir={layout.state / 'etcd'}",
        # Nobody's data outlives the machine here, and an fsync per write is most of a write.
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        f"--cert-file={layout.pki / 'etcd.crt'}",
        f"--key-file={layout.pki / 'etcd.key'}",
        *tls,
    ]


def _apiserver(layout: Layout) -> list[str]:
    pki = layout.pki
    groups = runtime_config(layout.settings.kubernetes)
    served = [f"--runtime-config={as_flag(groups)}"] if groups else []
    return [
        f"--etcd-servers=https://{layout.loopback}:2379",
        f"--etcd-cafile={pki / 'ca.crt'}",
        f"--etcd-certfile={pki / 'apiserver-etcd.crt'}",
        f"--etcd-keyfile={pki / 'apiserver-etcd.key'}",
        f"--bind-address={layout.bridge_address}",
        f"--advertise-address={layout.bridge_address}",
        "--secure-port=6443",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--tls-cert-file={pki / 'apiserver.crt'}",
        f"--tls-private-key-file={pki / 'apiserver.key'}",
        f"--service-account-key-file={pki / 'service-account.pub'}",
        f"--service-account-signing-key-file={pki / 'service-account.key'}",
        f"--service-account-issuer=https://kubernetes.default.svc.{DNS_DOMAIN}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={layout.service_range}",
        "--allow-privileged",
        # By address: node names are in no DNS, and `kubectl logs` and `exec` would look them up.
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet.key'}",
        # Webhooks by pod address: there is no kube-proxy on the host to know service addresses.
        "--enable-aggregator-routing",
        f"--audit-policy-file={layout.state / 'audit-policy.json'}",
        f"--audit-log-path={layout.audit_log}",
        # A test that counts lines must not see the file turned over under it.
        "--audit-log-maxsize=10000",
        *_gate_flags(layout),
        *served,
    ]


def _controller(layout: Layout, name: str) -> list[str]:
    kubeconfig = layout.kubeconfig(name)
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--bind-address={layout.loopback}",
        "--leader-elect=false",
        # By default 20 requests a second: it would take four seconds to start.
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        *_gate_flags(layout),
    ]


def _controller_manager(layout: Layout) -> list[str]:
    return [
        *_controller(layout, "controller-manager"),
        f"--service-account-private-key-file={layout.pki / 'service-account.key'}",
        f"--root-ca-file={layout.pki / 'ca.crt'}",
        "--use-service-account-credentials",
        "--node-monitor-grace-period=15s",
        "--node-monitor-period=1s",
    ]


def _scheduler(layout: Layout) -> list[str]:
    return _controller(layout, "scheduler")


def _gate_flags(layout: Layout) -> list[str]:
    feature_gates = gates(layout.settings.kubernetes)
    return [f"--feature-gates={as_flag(feature_gates)}"] if feature_gates else []
