"""Certificates and kubeconfigs. Every folder of them is made whole or not at all."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

from tests.cluster.console import run
from tests.cluster.layout import Layout, Node

DAYS = "3650"
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
# file: subject. The certificates of clients; the group is what gives the rights.
CLIENTS = {
    "admin": "/O=system:masters/CN=admin",
    "apiserver-kubelet-client": "/O=system:masters/CN=kube-apiserver-kubelet-client",
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "proxy": "/CN=system:kube-proxy",
}


def issue(ca: Path, folder: Path, name: str, subject: str, extensions: str) -> None:
    """Makes a key and a certificate for it."""
    key, request, config = folder / f"{name}.key", folder / f"{name}.csr", folder / f"{name}.ext"
    config.write_text(extensions)
    run("openssl", "req", "-new", *KEY, "-keyout", key, "-out", request, "-subj", subject)
    signed = folder / f"{name}.crt"
    signer = ("-CA", ca / "ca.crt", "-CAkey", ca / "ca.key", "-CAcreateserial")
    run("openssl", "x509", "-req", "-in", request, "-out", signed, *signer, "-days", DAYS, "-extfile", config)
    request.unlink()
    config.unlink()


def fresh(folder: Path) -> Path:
    """An empty folder beside the final one."""
    work = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, mode=0o700)
    return work


def ensure_cluster(layout: Layout) -> Path:
    """The authority, the API server's and the clients' certificates, the key of service account tokens."""
    folder = layout.folder / "pki"
    if folder.exists():
        return folder
    work = fresh(folder)
    run("openssl", "req", "-x509", *KEY, "-keyout", work / "ca.key", "-out", work / "ca.crt", "-days", DAYS, "-subj", "/CN=kubernetes-ca")
    run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", work / "sa.key")
    run("openssl", "pkey", "-in", work / "sa.key", "-pubout", "-out", work / "sa.pub")
    names = ["kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost"]
    addresses = ["127.0.0.1", layout.node(1).address, layout.api_service]
    alternatives = ",".join([*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in addresses)])
    issue(work, work, "apiserver", "/CN=kube-apiserver", f"subjectAltName={alternatives}\nextendedKeyUsage=serverAuth\n")
    for name, subject in CLIENTS.items():
        issue(work, work, name, subject, "extendedKeyUsage=clientAuth\n")
    work.rename(folder)
    return folder


def ensure_node(layout: Layout, node: Node) -> Path:
    """A node's certificates."""
    folder = node.folder / "pki"
    if folder.exists():
        return folder
    work = fresh(folder)
    ca = layout.folder / "pki"
    issue(ca, work, "kubelet", f"/O=system:nodes/CN=system:node:{node.name}", "extendedKeyUsage=clientAuth\n")
    serving = f"subjectAltName=DNS:{node.name},IP:{node.address}\nextendedKeyUsage=serverAuth\n"
    issue(ca, work, "kubelet-serving", f"/O=system:nodes/CN=system:node:{node.name}", serving)
    work.rename(folder)
    return folder


def kubeconfig(layout: Layout, certificate: Path) -> str:
    """A kubeconfig with everything embedded, as JSON, which is YAML."""

    def embedded(path: Path) -> str:
        return base64.b64encode(path.read_bytes()).decode()

    name = f"agent-sandbox-{layout.name}"
    ca = embedded(layout.folder / "pki" / "ca.crt")
    user = {"client-certificate-data": embedded(certificate), "client-key-data": embedded(certificate.with_suffix(".key"))}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "clusters": [{"name": name, "cluster": {"server": layout.api_server, "certificate-authority-data": ca}}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
    }
    return json.dumps(config, indent=1)
