"""What the watches have told, with answers to calls of ours in between."""

from __future__ import annotations

from typing import Any

import pytest
from agent_sandbox_operator.refusals import read_refusal
from agent_sandbox_operator.settings import SettingsError, load_settings
from agent_sandbox_operator.store import Store, slim

KEY = ("ns", "one")


def made(version: int, *, uid: str = "u1", name: str = "one", **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version)}, "spec": {}, "status": {}, **more}


def version(store: Store) -> str | None:
    found = store.get("pods", KEY)
    return None if found is None else str(found["metadata"]["resourceVersion"])


def test_an_older_version_never_replaces_a_newer_one() -> None:
    store = Store()
    assert store.put("pods", made(5))
    assert not store.put("pods", made(4))
    assert not store.put("pods", made(5))
    assert version(store) == "5"


def test_a_deletion_is_about_one_object_and_not_about_the_next_of_its_name() -> None:
    store = Store()
    store.put("pods", made(5, uid="u2"))
    assert not store.drop("pods", made(4, uid="u1"))
    assert version(store) == "5"
    assert store.drop("pods", made(6, uid="u2"))
    assert version(store) is None


def test_an_answer_that_comes_after_the_news_of_the_end_brings_nothing_back() -> None:
    store = Store()
    store.put("pods", made(5))
    store.drop("pods", made(7))
    assert not store.put("pods", made(6))
    assert version(store) is None
    assert store.put("pods", made(8, uid="u2"))


def test_a_list_drops_what_it_does_not_hold_unless_that_is_newer() -> None:
    store = Store()
    store.put("pods", made(5))
    store.put("pods", made(9, uid="u2", name="two"))
    assert store.replace("pods", [], 7) == {KEY}
    assert version(store) is None
    assert store.get("pods", ("ns", "two")) is not None


def test_a_list_of_one_namespace_says_nothing_about_another() -> None:
    store = Store()
    store.put("pods", made(5))
    assert store.replace("pods", [], 7, within="other") == set()


def test_what_nobody_reads_is_not_kept() -> None:
    raw = made(1, spec={"nodeName": "n", "containers": [{"name": "c", "image": "i", "env": [{"name": "TOKEN", "value": "secret"}]}], "volumes": [{}]})
    raw["metadata"] |= {"managedFields": [{}], "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "secret", "a": "b"}}
    kept = slim("pods", raw)
    assert "secret" not in str(kept)
    assert kept["metadata"]["annotations"] == {"a": "b"}
    assert kept["spec"] == {"nodeName": "n", "containers": [{"name": "c", "image": "i"}]}


REFUSALS = {
    'pods "x" is forbidden: exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1': "QuotaExceeded",
    'pods "x" is forbidden: violates PodSecurity "restricted:latest": privileged': "PodSecurityRejected",
    'pods is forbidden: User "system:serviceaccount:a:b" cannot create resource "pods" in API group "" in the namespace "ns"': "NamespaceNotEnabled",
    'pods "x" is forbidden: unable to create new content in namespace ns because it is being terminated': "Deleting",
    'namespaces "ns" not found': "Deleting",
    'pods "x" is forbidden: pod rejected: RuntimeClass "none" not found': "AdmissionRejected",
    "admission webhook denied the request: no": "AdmissionRejected",
}


@pytest.mark.parametrize("said", REFUSALS)
def test_a_refusal_becomes_a_reason_with_the_servers_words_and_a_next_step(said: str) -> None:
    found = read_refusal("pod", "ns", said)
    assert found.reason == REFUSALS[said]
    assert found.seconds > 0
    assert found.reason == "Deleting" or said.rstrip(".") in found.message


def test_a_bad_setting_is_one_line_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"AGENT_SANDBOX_INIT_IMAGE: must name the image"):
        load_settings()
    monkeypatch.setenv("AGENT_SANDBOX_INIT_IMAGE", "init:1")
    monkeypatch.setenv("AGENT_SANDBOX_NAMESPACES", "a, b,a")
    assert load_settings().namespaces == ("a", "b")
    monkeypatch.setenv("AGENT_SANDBOX_OPERATOR_WORKERS", "none")
    with pytest.raises(SettingsError, match="AGENT_SANDBOX_OPERATOR_WORKERS"):
        load_settings()
    monkeypatch.delenv("AGENT_SANDBOX_OPERATOR_WORKERS")
    monkeypatch.setenv("AGENT_SANDBOX_NAMESPACES", "Bad_Name")
    with pytest.raises(SettingsError, match="AGENT_SANDBOX_NAMESPACES"):
        load_settings()
