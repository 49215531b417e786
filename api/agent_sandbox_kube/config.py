"""Where the API server is and who we are: a kubeconfig, or the service account of the pod."""

from __future__ import annotations

import asyncio
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

DEFAULT_FILE = "~/.kube/config"


class ConfigError(Exception):
    """No cluster can be spoken to with what is configured. One line, with the way out."""


@dataclass(frozen=True, slots=True)
class Connection:
    """An API server and our identity there."""

    server: str
    tls: ssl.SSLContext | None
    namespace: str = "default"
    """Of the kubeconfig's context, or of the pod."""
    _configuration: Any = field(default=None, repr=False)

    async def headers(self) -> dict[str, str]:
        """Authorization, where a token is used. Tokens from files and plugins are renewed by `kubernetes.aio`."""
        value = await self._configuration.get_api_key_with_prefix("BearerToken") if self._configuration is not None else None
        return {"Authorization": value} if value else {}


async def load_connection(kubeconfig: str | None = None, context: str | None = None) -> Connection:
    """From `kubeconfig`, else KUBECONFIG, else the pod's service account, else ~/.kube/config. ConfigError when none of them is there or can be used."""
    path = kubeconfig or os.environ.get("KUBECONFIG")
    configuration = type.__call__(Configuration)
    try:
        if not path and "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            return Connection(configuration.host, _tls(configuration), _own_namespace(), configuration)
        path = await asyncio.to_thread(_find_files, path or DEFAULT_FILE)
        loader = await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=path, context=context, client_configuration=configuration, persist_config=False
        )
        chosen = (loader.current_context or {}).get("context") or {}
        return Connection(configuration.host, _tls(configuration), str(chosen.get("namespace") or "default"), configuration)
    except (ConfigException, OSError, ValueError) as error:
        raise ConfigError(f"the configuration for Kubernetes ({path or 'service account'}) cannot be used: {error}") from error


def _find_files(told: str) -> str:
    """Those of the files that are there, in the form of KUBECONFIG."""
    found = [str(file) for part in told.split(os.pathsep) if part and (file := Path(part).expanduser()).exists()]
    if not found:
        raise ConfigError(f"no kubeconfig at {told}: set KUBECONFIG, or run in a pod with a service account")
    return os.pathsep.join(found)


def _tls(configuration: Any) -> ssl.SSLContext | None:
    if not str(configuration.host).startswith("https"):
        return None
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    # kubectl does not ask for it either, and authorities of real clusters lack what it wants (Python 3.13 sets it).
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _own_namespace() -> str:
    try:
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip() or "default"
    except OSError:
        return "default"
