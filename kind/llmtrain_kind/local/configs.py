"""The configuration file of every component, as text. Kubernetes reads JSON wherever it reads YAML."""

import base64
import json
from pathlib import Path
from typing import Any

from llmtrain_kind.local.layout import DNS_DOMAIN, PAUSE_IMAGE, Layout, Node

#: Node objects carry what real nodes of the trainer have: eight GPUs (there is no device behind them).
GPU_RESOURCE = "nvidia.com/gpu"
GPUS_PER_NODE = "8"


def kubeconfig(layout: Layout, user: str) -> str:
    """A kubeconfig for one certificate's user, with everything inside so that the file can be copied anywhere."""
    name = f"llmtrain-{layout.settings.name}"

    def data(file: str) -> str:
        return base64.b64encode((layout.pki / file).read_bytes()).decode()

    cluster = {"server": layout.api_url, "certificate-authority-data": data("ca.crt")}
    identity = {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": cluster}],
        "users": [{"name": user, "user": identity}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": user}}],
        "current-context": name,
    }
    return json.dumps(content, indent=1)


def containerd(node: Node, snapshotter: str) -> str:
    """containerd's configuration, version 3."""
    text = json.dumps  # a JSON string is a TOML string
    cri = "io.containerd.cri.v1"
    return f"""version = 3
root = {text(str(node.folder / "containerd"))}
state = {text(str(node.run / "containerd"))}
# These two write to folders that the whole machine shares, and nothing here needs them.
disabled_plugins = ["io.containerd.internal.v1.opt"]
[plugins.'io.containerd.nri.v1.nri']
  disable = true
[grpc]
  address = {text(str(node.socket))}
[ttrpc]
  address = {text(str(node.socket) + ".ttrpc")}
[plugins.'{cri}.images']
  snapshotter = {text(snapshotter)}
  use_local_image_pull = true
[plugins.'{cri}.images'.pinned_images]
  sandbox = {text(PAUSE_IMAGE)}
[plugins.'{cri}.runtime']
  restrict_oom_score_adj = true
  # Not in /run/netns, which the whole machine shares.
  netns_mounts_under_state_dir = true
[plugins.'{cri}.runtime'.cni]
  bin_dirs = [{text(str(node.cluster.programs))}]
  conf_dir = {text(str(node.folder / "cni"))}
[plugins.'{cri}.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = {text(str(node.cluster.state / "container.json"))}
[plugins.'{cri}.runtime'.containerd.runtimes.runc.options]
  SystemdCgroup = false
"""


def container_spec(default_spec: str, mounts: tuple[tuple[str, str], ...]) -> str:
    """The spec that every container starts from: containerd's default plus read-only mounts of the node.

    So a GPU node's toolkit mounts its driver, and so torch (5 GB) reaches a container without being in its image.
    """
    spec = json.loads(default_spec)
    # The CRI plugin brings its own /run where a pod wants one.
    spec["mounts"] = [mount for mount in spec["mounts"] if mount["destination"] != "/run"]
    for source, target in mounts:
        spec["mounts"].append({"destination": target, "type": "bind", "source": source, "options": ["rbind", "ro"]})
    return json.dumps(spec)


def cni(node: Node) -> str:
    """The pod network of one node: a bridge in its namespace, addresses from its own range."""
    addresses = {
        "type": "host-local",
        "ranges": [[{"subnet": node.pod_range}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": str(node.run / "addresses"),
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": True,
        "ipMasqBackend": "nftables",
        "hairpinMode": True,
        "ipam": addresses,
    }
    portmap = {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "1.0.0", "name": "llmtrain", "plugins": [bridge, portmap]}, indent=1)


def kubelet(node: Node, unified_cgroups: bool) -> str:
    """The kubelet's configuration."""
    cluster = node.cluster
    content: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": node.cgroup,
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": [],
        "containerRuntimeEndpoint": f"unix://{node.socket}",
        "address": node.address,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(cluster.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(cluster.pki / f"{node.name}.crt"),
        "tlsPrivateKeyFile": str(cluster.pki / f"{node.name}.key"),
        "clusterDNS": [cluster.bridge_address],
        "clusterDomain": DNS_DOMAIN,
        "resolvConf": "",
        "failSwapOn": False,
        # A dead node is noticed within seconds (see the controller manager's grace period).
        "nodeStatusUpdateFrequency": "3s",
        "nodeLeaseDurationSeconds": 10,
        # Images are loaded, not pulled: one that is collected would be gone for good.
        "imageGCHighThresholdPercent": 100,
        "imageMinimumGCAge": "24h",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "podLogsDir": str(node.folder / "pod-logs"),
        "maxPods": 110,
        "localStorageCapacityIsolation": False,
        "serializeImagePulls": False,
        "shutdownGracePeriod": "0s",
        "volumePluginDir": str(node.folder / "volume-plugins"),
    }
    if not unified_cgroups:
        content["failCgroupV1"] = False
    return json.dumps(content, indent=1)


def kube_proxy(node: Node) -> str:
    """kube-proxy's configuration. All it sets lies in the node's network namespace."""
    content = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": node.cluster.pod_range,
        "hostnameOverride": node.name,
        "clientConnection": {"kubeconfig": str(node.cluster.kubeconfig("proxy"))},
        # The connection tracking table is the machine's: leave its size alone.
        "conntrack": {"maxPerCore": 0, "min": 0},
    }
    return json.dumps(content, indent=1)


def corefile(layout: Layout) -> str:
    """CoreDNS: the cluster's names from the API server, all others from the host's resolver."""
    return f"""{DNS_DOMAIN} in-addr.arpa ip6.arpa {{
    bind {layout.bridge_address}
    kubernetes {DNS_DOMAIN} in-addr.arpa ip6.arpa {{
        kubeconfig {layout.kubeconfig("coredns")}
        pods insecure
        ttl 1
    }}
    errors
    ready {layout.loopback}:8181
}}
. {{
    bind {layout.bridge_address}
    errors
    forward . /etc/resolv.conf
    cache 5
}}
"""


def audit_policy() -> str:
    """One line per request. Left out: the endless reads and lease renewals of Kubernetes' own components."""
    own = {"userGroups": ["system:nodes"], "verbs": ["get", "list", "watch"]}
    own_users = [
        "system:apiserver",
        "system:kube-controller-manager",
        "system:kube-scheduler",
        "system:kube-proxy",
        "system:coredns",
    ]
    rules = [
        {"level": "None", **own},
        {"level": "None", "users": own_users, "verbs": ["get", "list", "watch"]},
        {"level": "None", "userGroups": ["system:nodes"], "resources": [_resource("coordination.k8s.io", "leases")]},
        {"level": "None", "nonResourceURLs": ["/readyz*", "/livez*", "/healthz*"]},
        {"level": "Metadata"},
    ]
    content = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "omitManagedFields": True,
        "rules": rules,
    }
    return json.dumps(content, indent=1)


def dns_permissions() -> list[tuple[str, dict[str, Any]]]:
    """(API path, object) pairs that let CoreDNS read services."""
    group = "rbac.authorization.k8s.io"
    name = "system:coredns"
    role = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": [
            {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
        ],
    }
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": name}],
    }
    base = f"/apis/{group}/v1"
    return [(f"{base}/clusterroles/{name}", role), (f"{base}/clusterrolebindings/{name}", binding)]


def gpus() -> dict[str, Any]:
    """The patch of a node's status that shows its GPUs."""
    amount = {GPU_RESOURCE: GPUS_PER_NODE}
    return {"status": {"capacity": amount, "allocatable": amount}}


def write(path: Path, text: str) -> Path:
    """Write a configuration file, readable by root alone since some hold keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def _resource(group: str, name: str) -> dict[str, Any]:
    return {"group": group, "resources": [name]}
