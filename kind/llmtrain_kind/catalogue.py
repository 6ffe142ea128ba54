"""Which programs a cluster is made of, their versions, and the Go packages they are built from.

Each family is one Go module under kind/programs/ (their dependency versions clash, so they cannot share one).
"""

from dataclasses import dataclass, replace

from llmtrain_kind.settings import DEFAULT_KUBERNETES


@dataclass(frozen=True)
class Family:
    """Programs built from one Go module at one version. ``packages`` maps program to Go package.

    ``tags`` are Go's build tags, with commas between them.
    """

    name: str
    version: str
    root: str
    packages: dict[str, str]
    flags: str = ""
    tags: str = ""

    def program_folder(self, program: str) -> str:
        """Name of the cache folder of one program."""
        return f"{program}-{self.version}"

    def linker_flags(self) -> str:
        """Flags for the Go linker: no symbol tables, and the version that the program reports."""
        return f"-s -w {self.flags}".strip()


def _named(prefix: str, *programs: str) -> dict[str, str]:
    return {program: f"{prefix}/{program}" for program in programs}


def kubernetes(version: str) -> Family:
    """Kubernetes at ``version``. Without the flags `kubectl version` and the version gates of CRDs read v0.0.0."""
    major, minor, _ = version.split(".")
    stamp = "-X k8s.io/component-base/version.git"
    return Family(
        name="kubernetes",
        version=version,
        root="k8s.io/kubernetes",
        packages=_named(
            "k8s.io/kubernetes/cmd",
            *("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"),
        ),
        flags=f"{stamp}Version=v{version} {stamp}Major={major} {stamp}Minor={minor}",
    )


_CNI = "github.com/containernetworking/plugins"
_FIXED = (
    Family("etcd", "3.6.16", "go.etcd.io/etcd/server/v3", {"etcd": "go.etcd.io/etcd/server/v3"}),
    Family(
        "containerd",
        "2.3.7",
        "github.com/containerd/containerd/v2",
        _named("github.com/containerd/containerd/v2/cmd", "containerd", "containerd-shim-runc-v2", "ctr"),
        "-X github.com/containerd/containerd/v2/version.Version=v2.3.7",
    ),
    Family(
        "cni",
        "1.9.1",
        _CNI,
        {
            **_named(f"{_CNI}/plugins/main", "bridge", "loopback"),
            **_named(f"{_CNI}/plugins/meta", "portmap"),
            **_named(f"{_CNI}/plugins/ipam", "host-local"),
        },
    ),
    Family("coredns", "1.15.0", "github.com/coredns/coredns", {"coredns": "github.com/coredns/coredns"}),
    Family("pause", "1", "", {"pause": "."}),
    Family(
        "helm",
        "4.3.1",
        "helm.sh/helm/v4",
        {"helm": "helm.sh/helm/v4/cmd/helm"},
        "-X helm.sh/helm/v4/internal/version.version=v4.3.1",
    ),
    Family(
        "versitygw",
        "1.8.0",
        "github.com/versity/versitygw",
        {"versitygw": "github.com/versity/versitygw/cmd/versitygw"},
        "-X main.Version=v1.8.0",
    ),
    Family(
        "prometheus",
        "0.316.0",
        "github.com/prometheus/prometheus",
        {"promtool": "github.com/prometheus/prometheus/cmd/promtool"},
        "-X github.com/prometheus/common/version.Version=3.16.0",
        # Without every cloud's service discovery, which no rule needs.
        "remove_all_sd",
    ),
    Family("kind", "0.33.0", "sigs.k8s.io/kind", {"kind": "sigs.k8s.io/kind"}),
)

#: What only the `kind` provider needs.
KIND_ONLY = ("kind",)
#: What only tests need: a server that speaks S3, and the judge of alert rules.
TESTS_ONLY = ("versitygw", "promtool")
#: What the person at the keyboard uses, whatever the provider.
CLIENTS = ("kubectl", "helm")


def families(kubernetes_version: str = DEFAULT_KUBERNETES) -> tuple[Family, ...]:
    """All families, with Kubernetes at the given version."""
    return (kubernetes(kubernetes_version), *_FIXED)


def choose(programs: tuple[str, ...], kubernetes_version: str) -> list[Family]:
    """The families of ``programs``, each narrowed to those; raises KeyError for an unknown program."""
    chosen = []
    missing = set(programs)
    for family in families(kubernetes_version):
        wanted = {program: path for program, path in family.packages.items() if program in programs}
        missing -= wanted.keys()
        if wanted:
            chosen.append(replace(family, packages=wanted))
    if missing:
        raise KeyError(", ".join(sorted(missing)))
    return chosen


def local_programs() -> tuple[str, ...]:
    """Every program the local provider needs."""
    others = (*KIND_ONLY, *TESTS_ONLY)
    return tuple(program for family in families() for program in family.packages if program not in others)
