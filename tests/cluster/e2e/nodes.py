"""What only the node can do to a sandbox."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster import nodes
from tests.cluster.console import wait_for
from tests.cluster.fixtures import Cluster
from tests.cluster.kubectl import Kubectl, Object
from tests.cluster.layout import Node

# The first process of a container: in its control group, and number 1 in the innermost of its pid namespaces.
FIND_FIRST = """
for process in $(grep -ls "$1" /proc/[0-9]*/cgroup); do
    folder=${process%/cgroup}
    if [ "$(awk '/^NSpid:/ && NF > 2 {print $NF}' "$folder/status" 2>/dev/null)" = 1 ]; then
        echo "${folder#/proc/}"
    fi
done
"""


def first_process(cluster: Cluster, pod: Object) -> tuple[Node, str]:
    """The node of a pod, and the number there of its container's first process."""
    cluster.needs_own()
    name = pod["spec"]["nodeName"]
    node = next(one for one in cluster.record.layout.nodes(cluster.record.count) if one.name == name)
    container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    found = nodes.enter(node, "sh", "-c", FIND_FIRST, "find", container).stdout.split()
    if len(found) != 1:
        pytest.fail(f"container {container} on {name} has no first process, or several: {found}")
    return node, found[0]


def kill_container(cluster: Cluster, pod: Object) -> None:
    """SIGKILL for its first process: nothing inside could do that."""
    node, number = first_process(cluster, pod)
    nodes.enter(node, "kill", "-9", number)


# Its memory limit becomes what it uses now, and it is the first that the kernel takes when that is not enough.
SQUEEZE = """
set -eu
folder=/sys/fs/cgroup/memory$(sed -n 's/^[0-9]*:memory://p' "/proc/$1/cgroup")
echo 1000 > "/proc/$1/oom_score_adj"
echo $(($(cat "$folder/memory.usage_in_bytes") + 262144)) > "$folder/memory.limit_in_bytes"
"""


def run_out_of_memory(cluster: Cluster, kubectl: Kubectl, pod: Object) -> None:
    """Has the kernel kill the first process for want of memory. Control groups of version 2 do that to the whole container; here it is played on version 1."""
    node, number = first_process(cluster, pod)
    container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
    command = kubectl.argv("exec", pod["metadata"]["name"], "--", "sh", "-c", "sleep 3; exec dd if=/dev/zero of=/dev/shm/fill bs=64k")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as eater:
        try:
            wait_for("the command runs", lambda: len(processes(node, container)) > 2, seconds=10)
            nodes.enter(node, "sh", "-c", SQUEEZE, "squeeze", number)
            eater.wait(30)
        finally:
            eater.kill()


def processes(node: Node, container: str) -> list[str]:
    """Numbers of all processes of a container."""
    return nodes.enter(node, "sh", "-c", 'grep -ls "$1" /proc/[0-9]*/cgroup | cut -d/ -f3', "find", container).stdout.split()
