"""What runs on a node and how it is configured: pure builders of command lines and files, compared whole where that matters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.cluster.layout import Layout, Node

PODS_AT_MOST = 500
PIDS_OF_A_POD = 4096
NODE_GONE_AFTER = "20s"
COREDNS_CONFIG = """cluster.local:53 in-addr.arpa:53 ip6.arpa:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        ttl 5
    }
    cache 5
    loadbalance
}
.:53 {
    errors
    template ANY ANY {
        rcode NXDOMAIN
    }
}
"""
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        # Secrets' contents never; leases and the cluster's own reads would be nine tenths of the log.
        {"level": "Metadata", "resources": [{"group": "", "resources": ["secrets", "serviceaccounts/token"]}]},
        {"level": "None", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
        {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"], "verbs": ["get", "list", "watch"]},
        {
            "level": "None",
            "users": ["system:kube-scheduler", "system:kube-controller-manager", "system:kube-proxy"],
            "verbs": ["get", "list", "watch"],
        },
        {"level": "Metadata"},
    ],
}
KWOK_CONFIG = {
    "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
    "kind": "KwokConfiguration",
    "options": {
        "manageAllNodes": False,
        "manageNodesWithAnnotationSelector": "kwok.x-k8s.io/node=fake",
        "nodeLeaseDurationSeconds": 40,
        # Its default of 4 at a time makes a crowd of pods a matter of minutes.
        "podPlayStageParallelism": 32,
    },
}

Entry = dict[str, Any]


def entry(node: Node, name: str, *argv: str | Path, after: list[dict[str, str]], env: dict[str, str] | None = None) -> Entry:
    """One component as the supervisor reads it."""
    return {"name": name, "argv": [str(word) for word in argv], "log": str(node.log(name)), "env": env or {}, "after": after}


def node_files(layout: Layout, node: Node, cni: Path) -> dict[Path, str]:
    """Configuration files of a node."""
    return {
        node.folder / "containerd.toml": containerd_config(node, cni),
        node.folder / "kubelet.json": json.dumps(kubelet_config(layout, node), indent=1),
        node.folder / "cni" / "10-pods.conflist": json.dumps(cni_config(layout, node), indent=1),
        **(control_plane_files(layout, node) if node.index == 1 else {}),
    }


def control_plane_files(layout: Layout, node: Node) -> dict[Path, str]:
    """Configuration files of what runs on the first node only."""
    return {
        node.folder / "audit-policy.json": json.dumps(AUDIT_POLICY, indent=1),
        node.folder / "local-path.json": local_path_config(layout),
        node.folder / "kwok.json": json.dumps(KWOK_CONFIG, indent=1),
    }


def containerd_config(node: Node, cni: Path) -> str:
    """Three things differ from the defaults: where everything lies, no lowered OOM scores, and gVisor beside runc."""
    return f"""version = 3
root = "{node.folder}/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.blockfile", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.erofs", "io.containerd.snapshotter.v1.zfs", "io.containerd.nri.v1.nri",
]
[grpc]
  address = "{node.containerd_socket}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "localhost/pause:1"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true  # root may lack CAP_SYS_RESOURCE, and then no pod sandbox would start
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{cni}"]
    conf_dir = "{node.folder}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runsc]
    runtime_type = "io.containerd.runsc.v1"
"""


def cni_config(layout: Layout, node: Node) -> dict[str, Any]:
    """A bridge for each node. No masquerading: pods keep their addresses between nodes, or policies would see nodes instead."""
    ipam = {"type": "host-local", "dataDir": "/run/cni", "ranges": [[{"subnet": node.pods}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True, "ipam": ipam}
    return {"cniVersion": "0.4.0", "name": f"pods-{layout.name}", "plugins": [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]}


def kubelet_config(layout: Layout, node: Node) -> dict[str, Any]:
    """KubeletConfiguration."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": f"{layout.folder}/pki/ca.crt"}, "webhook": {"enabled": True}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{node.folder}/pki/kubelet-serving.crt",
        "tlsPrivateKeyFile": f"{node.folder}/pki/kubelet-serving.key",
        "containerRuntimeEndpoint": f"unix://{node.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        # Two kubelets on one machine must not share /kubepods.
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [layout.dns_service],
        "clusterDomain": "cluster.local",
        # Names outside the cluster resolve nowhere, the same on every machine.
        "resolvConf": "/dev/null",
        "podLogsDir": f"{node.folder}/pod-logs",
        "featureGates": {"ImageVolume": True, "UserNamespacesSupport": True},
        "maxPods": PODS_AT_MOST,
        "podPidsLimit": PIDS_OF_A_POD,
        "serializeImagePulls": False,
        "nodeStatusUpdateFrequency": "5s",
        # The machine's disk is shared with everything else on it: images and pods are not evicted because somebody compiles.
        "imageGCHighThresholdPercent": 100,
        "imageMinimumGCAge": "24h",
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "50Mi"},
    }


def local_path_config(layout: Layout) -> str:
    """config.json of local-path-provisioner."""
    paths = {"node": "DEFAULT_PATH_FOR_NON_LISTED_NODES", "paths": [f"{layout.volumes}/local-path"]}
    return json.dumps({"nodePathMap": [paths]})


def node_components(layout: Layout, node: Node, binaries: Path) -> list[Entry]:
    """Everything that runs on a node; the first one carries the control plane too."""
    api = {"tcp": f"{layout.node(1).address}:6443"}
    own = {"address": node.address}
    runtime = {"unix": str(node.containerd_socket)}
    kubeconfigs = node.folder / "kubeconfigs"
    everywhere = [
        entry(node, "containerd", binaries / "containerd", "-c", node.folder / "containerd.toml", after=[], env=path_with(binaries)),
        entry(
            node, "kubelet", binaries / "kubelet", f"--kubeconfig={kubeconfigs}/kubelet", f"--config={node.folder}/kubelet.json",
            f"--hostname-override={node.name}", f"--node-ip={node.address}", f"--root-dir={node.folder}/kubelet", "--v=1",
            after=[api, own, runtime],
        ),
        entry(
            node, "kube-proxy", binaries / "kube-proxy", f"--kubeconfig={kubeconfigs}/proxy", f"--cluster-cidr={layout.pods_range}",
            "--proxy-mode=iptables", f"--hostname-override={node.name}", f"--bind-address={node.address}", "--oom-score-adj=0",
            # Tuning the connection table of the whole machine is not a test's business.
            "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0", "--v=1",
            after=[api, own],
        ),
        entry(
            node, "firewall", binaries / "firewall", f"--kubeconfig={kubeconfigs}/admin", f"--node={node.name}", f"--services={layout.services_range}",
            after=[api, own, {"file": str(applied(layout))}],
        ),
        entry(
            node, "volumes-node", binaries / "volumes", "serve", f"--node={node.name}", f"--kubelet={node.folder}/kubelet", f"--folder={layout.volumes}/disk",
            after=[{"file": str(node.folder / "kubelet" / "plugins_registry")}],
        ),
    ]  # fmt: skip
    return [*control_plane(layout, node, binaries), *everywhere] if node.index == 1 else everywhere


def applied(layout: Layout) -> Path:
    """Exists when the manifests are applied; what works on their objects is started after that."""
    return layout.folder / "applied"


def path_with(binaries: Path) -> dict[str, str]:
    """containerd finds its shims, and those find runc and runsc, by PATH: ours first."""
    return {"PATH": f"{binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


def control_plane(layout: Layout, node: Node, binaries: Path) -> list[Entry]:
    """etcd to kwok, in the first node's namespaces. Every one of them is started again when it dies, in any order."""
    pki = layout.folder / "pki"
    kubeconfigs = node.folder / "kubeconfigs"
    api = {"tcp": f"{node.address}:6443"}
    etcd, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
    ready = {"file": str(applied(layout))}
    return [
        entry(
            node, "etcd", binaries / "etcd", f"--data-dir={node.folder}/etcd", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}", "--log-level=warn",
            # A test's data is worth no disk flushes.
            "--unsafe-no-fsync",
            after=[],
        ),
        entry(
            node, "kube-apiserver", binaries / "kube-apiserver", f"--etcd-servers={etcd}", "--secure-port=6443", f"--advertise-address={node.address}",
            f"--bind-address={node.address}", f"--service-cluster-ip-range={layout.services_range}",
            f"--client-ca-file={pki}/ca.crt", f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key",
            f"--service-account-key-file={pki}/sa.pub", f"--service-account-signing-key-file={pki}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt", f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
            f"--kubelet-certificate-authority={pki}/ca.crt", "--kubelet-preferred-address-types=InternalIP",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction,PodSecurity,ResourceQuota", "--allow-privileged=true",
            "--feature-gates=ImageVolume=true,UserNamespacesSupport=true",
            f"--audit-policy-file={node.folder}/audit-policy.json", f"--audit-log-path={layout.audit_log}", "--audit-log-maxsize=100",
            "--audit-log-maxbackup=1", "--profiling=false", "--v=1",
            after=[{"address": node.address}, {"tcp": "127.0.0.1:2379"}],
        ),
        entry(
            node, "kube-controller-manager", binaries / "kube-controller-manager", f"--kubeconfig={kubeconfigs}/controller-manager",
            f"--service-account-private-key-file={pki}/sa.key", f"--root-ca-file={pki}/ca.crt", "--use-service-account-credentials",
            f"--cluster-cidr={layout.pods_range}", "--leader-elect=false", f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key", f"--node-monitor-grace-period={NODE_GONE_AFTER}", "--node-monitor-period=2s",
            "--kube-api-qps=200", "--kube-api-burst=400", "--v=1",
            after=[api],
        ),
        entry(
            node, "kube-scheduler", binaries / "kube-scheduler", f"--kubeconfig={kubeconfigs}/scheduler", "--leader-elect=false",
            "--kube-api-qps=200", "--kube-api-burst=400", "--v=1",
            after=[api],
        ),
        entry(
            node, "local-path-provisioner", binaries / "local-path-provisioner", "start", f"--config={node.folder}/local-path.json",
            f"--kubeconfig={kubeconfigs}/admin", "--namespace=local-path-storage", "--helper-image=localhost/busybox:1",
            "--service-account-name=local-path-provisioner-service-account",
            after=[api, ready], env={"KUBECONFIG": f"{kubeconfigs}/admin", "POD_NAMESPACE": "local-path-storage"},
        ),
        entry(
            node, "volumes", binaries / "volumes", "provision", f"--kubeconfig={kubeconfigs}/admin", f"--folder={layout.volumes}/disk",
            f"--local={layout.volumes}/fast",
            after=[api, ready],
        ),
        entry(
            node, "kwok", binaries / "kwok", f"--kubeconfig={kubeconfigs}/admin", f"--config={node.folder}/kwok.json",
            after=[api, ready],
        ),
    ]  # fmt: skip
