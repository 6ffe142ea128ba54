"""The cluster's own certificate authority and one certificate per component, made by the openssl command.

Elliptic-curve keys: an RSA key takes longer than all the rest of this together. Who a client is, Kubernetes reads off
its certificate: CN is the user, O the groups (kubernetes.io/docs/reference/access-authn-authz/authentication).
"""

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from llmtrain_kind.local.layout import DNS_DOMAIN, Layout
from llmtrain_kind.shell import run

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_DAYS = "3650"


@dataclass(frozen=True)
class Certificate:
    """One certificate to make: file name, subject in openssl's form, and the names it is a server under."""

    name: str
    subject: str
    server_names: tuple[str, ...] = ()


def certificates(layout: Layout) -> list[Certificate]:
    """All certificates of a cluster, its authority aside."""
    api_names = (
        *(f"IP:{address}" for address in ("127.0.0.1", layout.bridge_address, layout.service_address)),
        *("DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"),
        f"DNS:kubernetes.default.svc.{DNS_DOMAIN}",
    )
    return [
        Certificate("apiserver", "/CN=kube-apiserver", api_names),
        Certificate("apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
        Certificate("etcd", "/CN=etcd", (f"IP:{layout.loopback}",)),
        Certificate("apiserver-etcd", "/CN=kube-apiserver-etcd-client"),
        Certificate("admin", "/O=system:masters/CN=kubernetes-admin"),
        Certificate("controller-manager", "/CN=system:kube-controller-manager"),
        Certificate("scheduler", "/CN=system:kube-scheduler"),
        Certificate("proxy", "/CN=system:kube-proxy"),
        Certificate("coredns", "/CN=system:coredns"),
        *(
            Certificate(
                node.name, f"/O=system:nodes/CN=system:node:{node.name}", (f"IP:{node.address}", f"DNS:{node.name}")
            )
            for node in layout.nodes
        ),
    ]


def make_all(layout: Layout) -> None:
    """Write the authority, the service-account key pair and every certificate into the cluster's pki folder."""
    folder = layout.pki
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    run(authority_command(folder))
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", folder / "service-account.key"])
    run(
        ["openssl", "ec", "-in", folder / "service-account.key", "-pubout", "-out", folder / "service-account.pub"],
    )
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda certificate: _make(folder, certificate), certificates(layout)))


def authority_command(folder: Path) -> list[str]:
    """The openssl command that makes the cluster's certificate authority."""
    out = ["-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt"]
    return ["openssl", "req", "-x509", *_CURVE, *out, "-days", _DAYS, "-subj", "/CN=llmtrain-test-cluster"]


def request_command(folder: Path, certificate: Certificate) -> list[str]:
    """The openssl command that makes a key and a signing request."""
    out = ["-keyout", f"{folder}/{certificate.name}.key", "-out", f"{folder}/{certificate.name}.csr"]
    return ["openssl", "req", *_CURVE, *out, "-subj", certificate.subject]


def extensions(certificate: Certificate) -> str:
    """The extensions of a certificate as openssl reads them from a file."""
    names = f"subjectAltName={','.join(certificate.server_names)}\n" if certificate.server_names else ""
    return f"keyUsage=digitalSignature\nextendedKeyUsage=clientAuth,serverAuth\n{names}"


def _make(folder: Path, certificate: Certificate) -> None:
    stem = folder / certificate.name
    run(request_command(folder, certificate))
    stem.with_suffix(".ext").write_text(extensions(certificate))
    run(
        [
            *("openssl", "x509", "-req", "-in", f"{stem}.csr", "-out", f"{stem}.crt", "-days", _DAYS),
            # A random serial number: a serial file would be written by all of us at once.
            *("-CA", f"{folder}/ca.crt", "-CAkey", f"{folder}/ca.key", "-set_serial", f"0x1{secrets.token_hex(8)}"),
            *("-extfile", f"{stem}.ext"),
        ]
    )
