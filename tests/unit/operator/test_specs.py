"""Pure builders: whole objects, and the rules that all of them keep."""

from __future__ import annotations

import ipaddress
from decimal import Decimal
from typing import Any

import pytest
from agent_sandbox_core.v1alpha1 import LABEL_SANDBOX, LABEL_SANDBOX_UID, SandboxObject
from agent_sandbox_core.v1alpha1.quantities import format_bytes, parse_quantity
from agent_sandbox_operator.specs import (
    CANARY,
    CONTROL,
    Birth,
    PodOptions,
    allow_policy,
    build_canary,
    build_pod,
    build_pvc,
    namespace_policies,
    template_hash,
)
from hypothesis import given
from hypothesis import strategies as st

from .worlds import CHILD, OPTIONS, UID, sandbox

INIT_CONTAINER = PodOptions(init_image="init:1", delivery="init-container", user_namespace=False)
FULL: dict[str, Any] = {
    "command": ["run"],
    "env": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretName": "env"}],
    "network": {"mode": "Open"},
    "runtimeClassName": "gvisor",
    "readOnlyRootFilesystem": False,
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "imagePullSecrets": [{"name": "pull"}],
}
PODS = {
    "bare": build_pod(sandbox(), OPTIONS, Birth()),
    "full": build_pod(sandbox(**FULL), OPTIONS, Birth("return", 3)),
    "init container": build_pod(sandbox(), INIT_CONTAINER, Birth()),
    "ephemeral": build_pod(sandbox(workspace={"ephemeral": True}), OPTIONS, Birth()),
    "canary": build_canary("c", "ns", CANARY, "init:1"),
    "control": build_canary("c", "ns", CONTROL, "init:1"),
}


@pytest.mark.parametrize("name", PODS)
def test_every_pod_keeps_the_rules_of_the_restricted_profile_in_every_container(name: str) -> None:
    spec = PODS[name]["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {next(iter(volume.keys() - {"name"})) for volume in spec.get("volumes", [])} <= {"emptyDir", "persistentVolumeClaim", "image"}
    for container in spec["containers"] + spec.get("initContainers", []):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
        assert security["runAsNonRoot"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["resources"]["limits"].keys() == {"cpu", "memory", "ephemeral-storage"}
        assert not container.get("ports")


def test_the_whole_pod_of_a_bare_sandbox() -> None:
    assert build_pod(sandbox(resources={"memory": "512Mi"}), OPTIONS, Birth())["spec"] == {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostname": "sandbox",
        "hostUsers": False,
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"], "options": [{"name": "timeout", "value": "1"}, {"name": "attempts", "value": "1"}]},
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "runAsGroup": 1000,
            "fsGroup": 1000,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": "sandbox",
                "image": "python:3",
                "command": ["/opt/agent-sandbox/sandbox-init", "serve"],
                "workingDir": "/workspace",
                "env": [{"name": "HOME", "value": "/workspace"}],
                "resources": {
                    "limits": {"cpu": "1", "memory": "528Mi", "ephemeral-storage": "2Gi"},
                    "requests": {"cpu": "100m", "memory": "528Mi", "ephemeral-storage": "64Mi"},
                },
                "securityContext": {
                    "privileged": False,
                    "allowPrivilegeEscalation": False,
                    "runAsNonRoot": True,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                    "readOnlyRootFilesystem": True,
                },
                "volumeMounts": [
                    {"name": "workspace", "mountPath": "/workspace"},
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "shm", "mountPath": "/dev/shm"},
                    {"name": "sandbox-init", "mountPath": "/opt/agent-sandbox", "readOnly": True},
                ],
            }
        ],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": CHILD}},
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}},
            {"name": "sandbox-init", "image": {"reference": "registry.test/sandbox-init@sha256:1"}},
        ],
    }


def test_a_full_spec_reaches_the_pod() -> None:
    spec = PODS["full"]["spec"]
    assert spec["runtimeClassName"] == "gvisor"
    assert spec["nodeSelector"] == {"disk": "ssd"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert "dnsPolicy" not in spec
    container = spec["containers"][0]
    assert container["envFrom"] == [{"secretRef": {"name": "env", "optional": False}}]
    assert container["securityContext"]["readOnlyRootFilesystem"] is False
    # sandbox-init is always the first process: the spec's command is its child.
    assert container["command"] == ["/opt/agent-sandbox/sandbox-init", "serve"]


def test_a_pod_carries_the_life_of_its_sandbox() -> None:
    assert PODS["full"]["metadata"]["annotations"] == {
        "agentsandbox.dev/template-hash": template_hash(sandbox(**FULL).spec),
        "agentsandbox.dev/starts-before": "3",
        "agentsandbox.dev/cause": "return",
        "agentsandbox.dev/init-delivery": "image-volume",
    }
    assert PODS["full"]["metadata"]["labels"]["agentsandbox.dev/network"] == "open"


@pytest.mark.parametrize("child", [PODS["bare"], build_pvc(sandbox()), allow_policy(sandbox())], ids=["pod", "PVC", "policy"])
def test_every_child_has_the_sandbox_as_its_controller_and_in_its_labels(child: dict[str, Any]) -> None:
    metadata = child["metadata"]
    assert metadata["name"] == CHILD
    assert metadata["namespace"] == "ns"
    assert metadata["labels"][LABEL_SANDBOX] == "one"
    assert metadata["labels"][LABEL_SANDBOX_UID] == UID
    owner = metadata["ownerReferences"][0]
    assert (owner["uid"], owner["controller"]) == (UID, True)
    assert owner.get("blockOwnerDeletion", False) == (child["kind"] == "Pod")


def test_values_of_variables_are_meant_as_they_stand() -> None:
    pod = build_pod(sandbox(env=[{"name": "A", "value": "$(B) $$ $C"}, {"name": "HOME", "value": "/tmp"}]), OPTIONS, Birth())
    assert pod["spec"]["containers"][0]["env"] == [{"name": "A", "value": "$$(B) $$$$ $$C"}, {"name": "HOME", "value": "/tmp"}]
    given = build_pod(sandbox(), OPTIONS, Birth(home_given=True))
    assert given["spec"]["containers"][0]["env"] == []


def test_memory_files_leave_room_for_the_next_container() -> None:
    for memory, tmp, shm in (("96Mi", "48Mi", "24Mi"), ("8Gi", "256Mi", "64Mi"), ("16Mi", "8Mi", "4Mi")):
        volumes = {one["name"]: one for one in build_pod(sandbox(resources={"memory": memory}), OPTIONS, Birth())["spec"]["volumes"]}
        assert (volumes["tmp"]["emptyDir"]["sizeLimit"], volumes["shm"]["emptyDir"]["sizeLimit"]) == (tmp, shm)


def test_requests_are_never_over_limits_and_equal_when_asked_for() -> None:
    small = build_pod(sandbox(resources={"cpu": "50m", "memory": "64Mi"}), OPTIONS, Birth())["spec"]["containers"][0]["resources"]
    assert small["requests"]["cpu"] == "50m"
    guaranteed = build_pod(sandbox(resources={"cpu": "2", "memory": "1Gi", "requests": {"cpu": "2", "memory": "1Gi"}}), OPTIONS, Birth())
    resources = guaranteed["spec"]["containers"][0]["resources"]
    assert (resources["limits"]["cpu"], resources["limits"]["memory"]) == (resources["requests"]["cpu"], resources["requests"]["memory"])


def test_an_ephemeral_workspace_has_its_size_and_its_marks_on_the_pod() -> None:
    pod = build_pod(sandbox(workspace={"ephemeral": True, "size": "1Gi"}, source={"snapshotName": "s"}), OPTIONS, Birth())
    assert pod["spec"]["volumes"][0] == {"name": "workspace", "emptyDir": {"sizeLimit": "1Gi"}}
    assert pod["spec"]["containers"][0]["resources"]["limits"]["ephemeral-storage"] == "3Gi"
    assert pod["metadata"]["annotations"]["agentsandbox.dev/restored"] == ""


def test_a_fresh_workspace_says_which_restore_counts_as_done() -> None:
    restore = {"snapshotName": "s", "requestID": "r1"}

    def marks(**spec: Any) -> dict[str, str]:
        found: dict[str, str] = build_pvc(sandbox(**spec))["metadata"]["annotations"]
        return {key.removeprefix("agentsandbox.dev/"): value for key, value in found.items()}

    assert marks() == {"restored": "none"}
    assert marks(restore=restore) == {"restored": "r1"}
    assert marks(source={"snapshotName": "s"}) == {"restored": ""}
    assert marks(source={"snapshotName": "s"}, restore=restore) == {"restored": "", "restore-at-creation": "r1"}


def test_sandbox_init_by_an_init_container_is_read_only_where_the_sandbox_runs() -> None:
    spec = PODS["init container"]["spec"]
    installer = spec["initContainers"][0]
    assert installer["command"] == ["/sandbox-init", "install", "/install"]
    assert "hostUsers" not in spec
    mount = next(one for one in spec["containers"][0]["volumeMounts"] if one["name"] == "sandbox-init")
    assert mount["readOnly"] is True


SAME_POD: list[dict[str, Any]] = [
    {"timeoutSeconds": 5},
    {"expiresAt": "2031-01-01T00:00:00Z"},
    {"shutdownPolicy": "Delete"},
    {"restore": {"snapshotName": "s", "requestID": "r"}},
    {"network": {"mode": "None", "allow": ["192.0.2.0/24"]}},
    {"pidsLimit": 99},
    {"workspace": {"size": "9Gi"}},
]


@pytest.mark.parametrize("spec", SAME_POD)
def test_the_hash_is_about_what_makes_the_pod_and_nothing_else(spec: dict[str, Any]) -> None:
    assert template_hash(sandbox(**spec).spec) == template_hash(sandbox().spec)


@pytest.mark.parametrize("field", ["command", "env", "envFrom", "network", "nodeSelector", "tolerations", "imagePullSecrets"])
def test_the_hash_changes_with_each_field_that_makes_the_pod(field: str) -> None:
    assert template_hash(sandbox(**{field: FULL[field]}).spec) != template_hash(sandbox().spec)


def test_the_hash_of_today_is_that_of_every_later_version() -> None:
    """A changed value here replaces every running pod at an upgrade."""
    assert template_hash(sandbox().spec) == "fe79c77b7a77d483"
    assert template_hash(sandbox(**FULL).spec) == "02a341ee39e6ab2f"


def test_a_network_policy_denies_both_ways_and_the_open_one_has_every_inside_range() -> None:
    deny, dns, opened = namespace_policies("ns", ("203.0.113.0/24", "2001:db8::/32"))
    assert deny["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & deny["spec"].keys()
    assert {port["port"] for port in dns["spec"]["egress"][0]["ports"]} == {53}
    blocks = [peer["ipBlock"] for peer in opened["spec"]["egress"][0]["to"]]
    for block in blocks:
        outer = ipaddress.ip_network(block["cidr"])
        for text in block["except"]:
            inner = ipaddress.ip_network(text)
            assert inner.version == outer.version
            assert inner.subnet_of(outer)  # type: ignore[arg-type]  # the versions are the same
            assert getattr(inner.network_address, "ipv4_mapped", None) is None
    assert "203.0.113.0/24" in blocks[0]["except"]
    assert "2001:db8::/32" in blocks[1]["except"]
    assert "169.254.0.0/16" in blocks[0]["except"]


def test_an_empty_allowlist_allows_nothing() -> None:
    def egress(of: SandboxObject) -> Any:
        return allow_policy(of)["spec"].get("egress")

    assert egress(sandbox(network={"mode": "Allowlist"})) is None
    assert egress(sandbox(network={"mode": "Allowlist", "allow": ["192.0.2.7"]})) == [{"to": [{"ipBlock": {"cidr": "192.0.2.7/32"}}]}]


@pytest.mark.parametrize(
    ("text", "value"),
    [("500m", "0.5"), ("1.5", "1.5"), ("512Mi", str(512 << 20)), ("1e9", "1000000000"), ("2k", "2000"), ("1G", "1000000000"), ("1Ti", str(1 << 40))],
)
def test_quantities_are_read(text: str, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize("text", ["", "-1", "1X", "Mi", "1.2.3", "1Mi "])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no quantity"):
        parse_quantity(text)


@given(st.integers(1, 1 << 50))
def test_bytes_are_written_so_that_they_are_read_as_the_same(number: int) -> None:
    assert parse_quantity(format_bytes(Decimal(number))) == number
