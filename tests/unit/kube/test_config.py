"""Where a connection comes from, and what is said when there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from agent_sandbox_kube import config
from agent_sandbox_kube.config import ConfigError, load_connection
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import incluster_config

from tests.unit.kube.apiserver import Object, kubeconfig
from tests.unit.kube.test_client import plugin

SERVER = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def in_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's service account."""
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("pod-token")
    (account / "namespace").write_text("home\n")
    (account / "ca.crt").write_text((Path(__file__).parent / "authority.pem").read_text())
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(account / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(account / "ca.crt"))
    monkeypatch.setattr(config, "OWN_NAMESPACE", account / "namespace")
    return account


def one_cluster(cluster: Object) -> str:
    context = {"name": "x", "context": {"cluster": "c"}}
    return json.dumps({"clusters": [{"name": "c", "cluster": cluster}], "contexts": [context], "users": [], "current-context": "x"})


async def test_without_any_configuration_both_ways_to_one_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no kubeconfig at ~/\.kube/config: set KUBECONFIG, or run in a pod with a service account"):
        await load_connection()


async def test_an_argument_comes_before_the_variable_that_comes_before_the_pod_that_comes_before_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_pod: Path
) -> None:
    home = tmp_path / "home" / ".kube"
    home.mkdir(parents=True)
    kubeconfig(home, "http://home")
    assert (await load_connection()).server == "https://[fd00::1]:443"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert (await load_connection()).server == "http://home"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBECONFIG", kubeconfig(tmp_path, "http://variable", name="variable"))
    assert (await load_connection()).server == "http://variable"
    assert (await load_connection(kubeconfig(tmp_path, "http://argument"))).server == "http://argument"


async def test_a_pod_uses_its_service_account_and_its_namespace(in_pod: Path) -> None:
    connection = await load_connection()
    assert connection.namespace == "home"
    assert await connection.headers() == {"Authorization": "bearer pod-token"}
    assert connection.tls is not None and connection.tls.check_hostname


async def test_a_broken_service_account_is_told(in_pod: Path) -> None:
    (in_pod / "token").unlink()
    with pytest.raises(ConfigError, match=r"the service account of this pod cannot be used: Service token file does not exist\."):
        await load_connection()


async def test_missing_files_in_the_variable_are_passed_over_and_the_first_context_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = kubeconfig(tmp_path, "http://first", name="a"), kubeconfig(tmp_path, "http://second", name="b")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(tmp_path / "none"), first, second]))
    connection = await load_connection()
    assert (connection.server, connection.namespace, connection.tls) == ("http://first", "team", None)


async def test_no_state_is_shared_between_connections_or_with_the_process(tmp_path: Path) -> None:
    one = await load_connection(kubeconfig(tmp_path, SERVER, {"token": "one"}, "a"))
    two = await load_connection(kubeconfig(tmp_path, SERVER, {}, "b"))
    assert (await one.headers(), await two.headers()) == ({"Authorization": "Bearer one"}, {})
    assert Configuration.get_default_copy().host != SERVER


async def test_a_token_from_a_file_is_read_again_when_its_time_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("old")
    connection = await load_connection(kubeconfig(tmp_path, SERVER, {"tokenFile": "token"}))
    (tmp_path / "token").write_text("new")
    assert await connection.headers() == {"Authorization": "Bearer old"}
    monkeypatch.setattr(config, "RENEW_SECONDS", 0)
    assert await connection.headers() == {"Authorization": "Bearer new"}


async def test_a_plugin_is_asked_again_only_when_its_answer_was_refused(tmp_path: Path) -> None:
    connection = await load_connection(kubeconfig(tmp_path, SERVER, plugin(tmp_path)))
    assert await connection.headers() == await connection.headers() == {"Authorization": "Bearer token-1"}
    assert await connection.renew("Bearer token-1")
    assert await connection.renew("Bearer token-1"), "somebody else has renewed it already"
    assert await connection.headers() == {"Authorization": "Bearer token-2"}


async def test_a_fixed_token_that_was_refused_cannot_be_renewed(tmp_path: Path) -> None:
    connection = await load_connection(kubeconfig(tmp_path, SERVER, {"token": "one"}))
    assert not await connection.renew("Bearer one")


async def test_a_proxy_and_the_name_in_the_servers_certificate_are_taken_over(tmp_path: Path) -> None:
    path = Path(kubeconfig(tmp_path, "https://127.0.0.1:1"))
    told = json.loads(path.read_text())
    told["clusters"][0]["cluster"] |= {"proxy-url": "http://proxy:3128", "tls-server-name": "kubernetes", "insecure-skip-tls-verify": True}
    path.write_text(json.dumps(told))
    connection = await load_connection(str(path))
    assert (connection.proxy, connection.tls_name) == ("http://proxy:3128", "kubernetes")
    assert connection.tls is not None and not connection.tls.check_hostname


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "secret",
        "{}",
        "users: secret",
        "token: secret\n\t- broken",
        "clusters: []\ncontexts: []\nusers: []\ncurrent-context: secret-one\n",
        one_cluster({}),
        one_cluster({"server": "https://x", "certificate-authority-data": "secret"}),
        one_cluster({"server": "https://x", "certificate-authority": "nowhere.pem"}),
    ],
)
async def test_a_file_that_is_no_kubeconfig_is_named_in_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        await load_connection(str(path))
    text = str(caught.value)
    assert str(path) in text and "\n" not in text
    assert "token: secret" not in text and '"secret"' not in text


async def test_a_context_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nope"):
        await load_connection(kubeconfig(tmp_path, SERVER), context="nope")
