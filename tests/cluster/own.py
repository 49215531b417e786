"""The cluster of our own: up, down, status, logs, load. Every step looks first, so that a repeated `up` heals and a killed one leaves nothing unclear."""

from __future__ import annotations

import json
import os
import shutil
import string
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import build, components, images, machine, nodes, processes, versions
from tests.cluster.console import ClusterError, locked, run, say, tail, wait_for, write_if_changed
from tests.cluster.kubectl import Kubectl
from tests.cluster.layout import SLOTS, Layout, Node, state_root

LOCK_SECONDS = 300.0
API_SECONDS = 60.0
READY_SECONDS = 90.0
IMPORT_SECONDS = 180.0
LINK_SECONDS = 10.0
MANIFESTS = Path(__file__).resolve().parent / "manifests"


@dataclass(frozen=True)
class Record:
    """cluster.json: written before anything else is made, so that `down` knows of everything."""

    layout: Layout
    count: int
    digest: str

    def save(self) -> None:
        """Writes it."""
        content = {"name": self.layout.name, "slot": self.layout.slot, "nodes": self.count, "digest": self.digest}
        write_if_changed(self.layout.folder / "cluster.json", json.dumps(content))


def find(name: str) -> Record | None:
    """What is known about a cluster; None when there is none of that name."""
    Layout(name, 0)
    try:
        content = json.loads((state_root() / name / "cluster.json").read_text())
    except FileNotFoundError:
        return None
    return Record(Layout(content["name"], content["slot"]), content["nodes"], content["digest"])


def names() -> list[str]:
    """Clusters that have a record."""
    return sorted(path.parent.name for path in state_root().glob("*/cluster.json"))


def lock_of(name: str) -> Path:
    """Beside the clusters' folders: it outlives `down`."""
    return state_root() / ".locks" / name


def ensure_record(name: str, count: int) -> Record:
    """The cluster's record; for a new one a slot whose addresses nobody uses."""
    known = find(name)
    if known is not None:
        wanted = Record(known.layout, max(count, known.count), known.digest)
        wanted.save()
        return wanted
    with locked(state_root() / ".locks" / ".slots", seconds=LOCK_SECONDS, what="the list of clusters"):
        taken = {record.layout.slot for record in map(find, names()) if record}
        foreign = machine.host_networks()
        for slot in range(SLOTS):
            layout = Layout(name, slot)
            if slot not in taken and not any(layout.overlaps(network) for network in foreign):
                made = Record(layout, count, versions.digest())
                made.save()
                return made
    raise ClusterError(
        f"no addresses are left for cluster {name}: of 10.213.N.0/24, 10.214.0.0/16 and 10.96.0.0/16 every part is in use by this machine's networks "
        f"or by the clusters {', '.join(names()) or '(none)'}; take one of those down"
    )


def up(name: str, count: int, *, few_images: bool = False) -> Record:
    """Builds what is missing, then starts what does not run; returns when all of it works. `few_images` leaves the big test image out."""
    machine.require_root()
    Layout(name, 0).nodes(count)
    known = find(name)
    if known is not None and known.digest != versions.digest() and processes.supervisors(name):
        raise ClusterError(
            f"cluster {name} runs another build than versions.toml and programs/ say now: take it down first (make cluster-down NAME={name})"
        )
    if known is not None and known.count >= count and known.digest == versions.digest() and works(known):
        say(f"cluster {name} is up ({known.count} {'node' if known.count == 1 else 'nodes'}); KUBECONFIG={known.layout.kubeconfig}")
        return known
    binaries = build.ensure()
    machine.ensure_packages()
    archives = images.ensure(few=few_images)
    with locked(lock_of(name), seconds=LOCK_SECONDS, what=f"cluster {name}"):
        began = time.monotonic()
        record = ensure_record(name, count)
        if record.digest != versions.digest():
            # Nothing of it runs, and its data is another version's.
            remove(record.layout)
            record = ensure_record(name, count)
        start(record, binaries, archives)
        say(f"cluster {name} is up after {time.monotonic() - began:.1f} s; KUBECONFIG={record.layout.kubeconfig}")
    return record


def start(record: Record, binaries: Path, archives: Sequence[Path]) -> None:
    """Brings every node up and waits for what users of the cluster need."""
    layout = record.layout
    members = layout.nodes(record.count)
    for node in members:
        nodes.prepare_files(layout, node, binaries)
    pids = {node.name: nodes.ensure_supervisor(node) for node in members}
    nodes.connect(layout, pids)
    say(f"{len(members)} {'node has' if len(members) == 1 else 'nodes have'} started; API server at {layout.api_server}")
    # Nodes read images from disk while the control plane starts.
    with ThreadPoolExecutor(len(members)) as pool:
        imports = [pool.submit(import_missing, node, archives) for node in members]
        try:
            control = kubectl(layout)
            wait_for("the API server", lambda: answers(control), seconds=API_SECONDS, every=0.2, explain=lambda: troubles(members))
            control.run("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifests(layout), seconds=60)
            components.applied(layout).touch()
            say("the API server answers; manifests are applied")
        finally:
            for finished in imports:
                finished.result()
    for node in members:
        for component, state in nodes.states(node).items():
            if state["pid"] is None:
                # Waiting after a failure that is over now.
                nodes.order(node, "start", component)
    wait_until_works(record)


def wait_until_works(record: Record) -> None:
    """Waits until nothing is missing."""
    missing: list[str] = []

    def complete() -> bool:
        missing[:] = shortcomings(record)
        return not missing

    members = record.layout.nodes(record.count)
    wait_for(
        f"cluster {record.layout.name}",
        complete,
        seconds=READY_SECONDS,
        every=0.3,
        explain=lambda: f"; missing: {'; '.join(missing)}\n{troubles(members)}",
    )


def works(record: Record) -> bool:
    """Whether nothing is missing, looked at once."""
    running = processes.supervisors(record.layout.name)
    if any(node.name not in running for node in record.layout.nodes(record.count)):
        return False
    return not shortcomings(record)


def shortcomings(record: Record) -> list[str]:
    """What a user of the cluster would miss, in words."""
    layout = record.layout
    members = layout.nodes(record.count)
    missing = [
        f"{node.name} runs no {name}" for node in members for name, state in nodes.states(node).items() if state["wanted"] and state["pid"] is None
    ]
    control = kubectl(layout)
    asked = control.run(
        "get", "nodes,csinodes,deployments.apps,serviceaccounts", "--all-namespaces", "--output=json", "--request-timeout=10s", check=False
    )
    if asked.returncode != 0:
        return [*missing, f"the API server does not answer: {asked.stderr.strip()[-300:]}"]
    found = {(item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"]): item for item in json.loads(asked.stdout)["items"]}
    for node in members:
        item = found.get(("Node", "", node.name))
        if item is None:
            missing.append(f"{node.name} is not registered")
        elif not any(c["type"] == "Ready" and c["status"] == "True" for c in item["status"].get("conditions", [])):
            missing.append(f"{node.name} is not Ready")
        drivers = found.get(("CSINode", "", node.name), {}).get("spec", {}).get("drivers") or []
        if not drivers:
            missing.append(f"{node.name} has no driver for volumes of class disk yet")
    if ("ServiceAccount", "default", "default") not in found:
        missing.append("namespace default has no service account yet")
    if not found.get(("Deployment", "kube-system", "coredns"), {}).get("status", {}).get("readyReplicas"):
        missing.append("CoreDNS is not ready")
    return missing


def troubles(members: Sequence[Node]) -> str:
    """The logs' last lines of components that died or do not run."""
    told = []
    for node in members:
        for name, state in nodes.states(node).items():
            if state["pid"] is None or state["restarts"]:
                told.append(
                    f"--- {name} on {node.name} (restarts {state['restarts']}, last exit {state['last_exit']}), the end of its log:\n{tail(node.log(name), 8)}"
                )
    return "\n".join(told) or "(every component runs)"


def answers(control: Kubectl) -> bool:
    """Whether the API server calls itself ready."""
    return control.run("get", "--raw", "/readyz", "--request-timeout=5s", check=False).returncode == 0


def manifests(layout: Layout) -> str:
    """manifests/cluster.yaml, filled in."""
    corefile = "".join(f"    {line}\n" for line in components.COREDNS_CONFIG.splitlines()).rstrip()
    return string.Template((MANIFESTS / "cluster.yaml").read_text()).substitute(corefile=corefile, dns_service=layout.dns_service)


def kubectl(layout: Layout) -> Kubectl:
    """The administrator's."""
    return Kubectl(str(build.binaries() / "kubectl"), layout.kubeconfig)


def ctr(node: Node, *words: str, seconds: float = 30, check: bool = True) -> str:
    """containerd's own client, on the images that the kubelet sees."""
    return run(build.binaries() / "ctr", "--address", node.containerd_socket, "--namespace", "k8s.io", *words, seconds=seconds, check=check).stdout


def import_missing(node: Node, archives: Sequence[Path]) -> None:
    """Imports those archives that the node does not have yet; what it has is remembered beside it."""
    done = node.folder / "imported"
    wait_for(
        f"containerd on {node.name}", lambda: containerd_ready(node), seconds=30, explain=lambda: f"; its log ends:\n{tail(node.log('containerd'))}"
    )
    for archive in archives:
        stamp = f"{archive} {archive.stat().st_mtime_ns}\n"
        if not done.exists() or stamp not in done.read_text():
            import_archive(node, archive)
            with done.open("a") as remembered:
                remembered.write(stamp)


def containerd_ready(node: Node) -> bool:
    """Whether its API answers."""
    return run(build.binaries() / "ctr", "--address", node.containerd_socket, "version", seconds=10, check=False).returncode == 0


def import_archive(node: Node, archive: Path) -> None:
    """Puts one image archive into a node."""
    ctr(node, "images", "import", "--digests=false", str(archive), seconds=IMPORT_SECONDS)


def down(name: str) -> None:
    """Ends and removes everything of a cluster, whatever state it is in; builds and images stay."""
    machine.require_root()
    Layout(name, 0)
    with locked(lock_of(name), seconds=LOCK_SECONDS, what=f"cluster {name}"):
        record = find(name)
        if record is None and not processes.everything(name) and not (state_root() / name).exists():
            say(f"cluster {name} is not up")
            return
        began = time.monotonic()
        if record is not None:
            count = remove(record.layout)
        else:
            count = processes.kill(name)
            nodes.remove_cgroups(name)
            nodes.remove_folder(state_root() / name)
        say(f"cluster {name} is down: {count} processes ended, {time.monotonic() - began:.1f} s")


def remove(layout: Layout) -> int:
    """Ends all processes, which ends mounts and namespaces; removes links, control groups and the folder, the record last."""
    count = processes.kill(layout.name)
    own = {node.link for node in layout.nodes(4)}
    for link in sorted(own & nodes.links(None)):
        run("ip", "link", "delete", link, check=False)
    wait_for(f"end of the links of cluster {layout.name}", lambda: not own & nodes.links(None), seconds=LINK_SECONDS)
    nodes.remove_cgroups(layout.name)
    graveyard = layout.folder.with_name(f".{layout.name}.gone")
    nodes.remove_folder(graveyard)
    layout.folder.rename(graveyard)
    nodes.remove_folder(graveyard)
    return count


def load(record: Record, image: str) -> None:
    """Puts an image into every node: an archive file, or a name that buildah or Docker knows."""
    with tempfile.TemporaryDirectory(dir=record.layout.folder, prefix="load-") as work:
        archive = Path(image) if Path(image).is_file() else export(image, Path(work) / "image.tar")
        for node in record.layout.nodes(record.count):
            import_archive(node, archive)
            say(f"{image} is on {node.name}")


def export(image: str, archive: Path) -> Path:
    """Saves an image of buildah's or Docker's as an archive that carries its name."""
    tried = []
    if shutil.which("buildah"):
        done = run("buildah", "push", "--quiet", image, f"docker-archive:{archive}:{image}", seconds=600, check=False)
        if done.returncode == 0:
            return archive
        tried.append(f"buildah: {done.stderr.strip()[-300:]}")
        archive.unlink(missing_ok=True)
    if shutil.which("docker"):
        done = run("docker", "save", "--output", archive, image, seconds=600, check=False)
        if done.returncode == 0:
            return archive
        tried.append(f"docker: {done.stderr.strip()[-300:]}")
    raise ClusterError(
        f"{image} is no file, and neither buildah nor docker has an image of that name\n" + "\n".join(tried or ["(neither is installed)"])
    )


def status(record: Record) -> list[str]:
    """Lines for people."""
    layout = record.layout
    running = processes.supervisors(layout.name)
    lines = [
        f"cluster {layout.name}: {record.count} nodes, kubeconfig {layout.kubeconfig}, pods {layout.pods_range}, services {layout.services_range}"
    ]
    for node in layout.nodes(record.count):
        lines.append(f"  {node.name} {node.address}: {f'process {running[node.name]}' if node.name in running else 'does not run'}")
        if node.name in running:
            for name, state in nodes.states(node).items():
                how = f"process {state['pid']} of the node" if state["pid"] else "stopped" if not state["wanted"] else "not running"
                lines.append(f"    {name}: {how}" + (f", restarts {state['restarts']}, last exit {state['last_exit']}" if state["restarts"] else ""))
    missing = shortcomings(record)
    lines.append("  everything works" if not missing else "  missing: " + "; ".join(missing))
    return lines


def memory(name: str) -> int:
    """Resident bytes of all its processes, what they share counted for each."""
    total = 0
    for pid in processes.everything(name):
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total
