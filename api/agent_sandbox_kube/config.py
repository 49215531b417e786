"""Where the API server is and who we are: a kubeconfig, or the service account of the pod. Read by `kubernetes.aio`; nothing process-wide is set."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

DEFAULT_FILE: Final = "~/.kube/config"
OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
RENEW_SECONDS: Final = 60.0
"""How often credentials that can change are looked at: token files, certificates, tokens of plugins, OIDC."""
LOAD_SECONDS: Final = 30.0
"""A plugin may ask somebody in a browser: not here."""


class ConfigError(Exception):
    """No cluster can be spoken to with what is configured. One line, with the way out."""


class Connection:
    """An API server and our identity there, which is renewed while it is used.

    `tls` is None for http, `tls_name` the name in its certificate when that is not its address, `proxy` the URL of a proxy on the way there.
    `namespace` is that of the kubeconfig's context, or of the pod.
    """

    def __init__(self, configuration: Any, namespace: str, loader: Any = None, source: str = "") -> None:
        self.server = str(configuration.host).rstrip("/")
        self.namespace = namespace
        self.tls = _tls(configuration)
        self.tls_name: str | None = configuration.tls_server_name
        self.proxy: str | None = configuration.proxy
        self._configuration = configuration
        self._loader = loader
        self._source = source
        self._renewed = time.monotonic()
        self._renewing = asyncio.Lock()

    async def headers(self) -> dict[str, str]:
        """Authorization, where a token is used; renewed first when its time has come. ConfigError when that fails."""
        if self._loader is not None and time.monotonic() - self._renewed > RENEW_SECONDS:
            async with self._renewing:
                if time.monotonic() - self._renewed > RENEW_SECONDS:
                    await self._renew()
        value = await self._configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": value} if value else {}

    async def renew(self, refused: str | None) -> bool:
        """Gets new credentials because the API server has refused those with this Authorization; False when there are no others. ConfigError when that fails."""
        if self._loader is None:
            return False
        async with self._renewing:
            if refused == self._configuration.api_key.get("BearerToken"):
                # A plugin is not asked again before its last answer has run out.
                vars(self._loader).pop("exec_plugin_expiry", None)
                await self._renew()
            return bool(refused != self._configuration.api_key.get("BearerToken"))

    async def _renew(self) -> None:
        async with _telling(self._source):
            await self._loader.load_and_set(self._configuration)
            if self.tls is not None:
                _take_identity(self.tls, self._configuration)
        self._renewed = time.monotonic()


async def load_connection(kubeconfig: str | None = None, context: str | None = None) -> Connection:
    """From `kubeconfig`, else KUBECONFIG, else the pod's service account, else ~/.kube/config. ConfigError when none of them is there or can be used."""
    path = kubeconfig or os.environ.get("KUBECONFIG")
    # Called plainly the class gives a copy of the process-wide default, which others may have set.
    configuration: Any = type.__call__(Configuration)
    configuration.host = ""
    if not path and "KUBERNETES_SERVICE_HOST" in os.environ:
        async with _telling("the service account of this pod"):
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            return Connection(configuration, await asyncio.to_thread(_own_namespace))
    path = await asyncio.to_thread(_find_files, path or DEFAULT_FILE)
    source = f"the kubeconfig {path}"
    async with _telling(source):
        loader = await load_kube_config(  # type: ignore[no-untyped-call]
            config_file=path, context=context, client_configuration=configuration, persist_config=False
        )
        if not configuration.host:
            raise ConfigError(f"{source} names no server for its cluster: correct it, or set KUBECONFIG to another")
        namespace = (loader.current_context.get("context") or {}).get("namespace") or "default"
        return Connection(configuration, str(namespace), loader, source)


@contextlib.asynccontextmanager
async def _telling(source: str) -> AsyncIterator[None]:
    """Whatever can be wrong with it as one line, without a word of its content."""
    try:
        async with asyncio.timeout(LOAD_SECONDS):
            yield
    except yaml.MarkedYAMLError as error:
        where = f" in line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError(f"{source} is not YAML ({error.problem}{where}): correct it, or set KUBECONFIG to another") from error
    except TimeoutError as error:
        raise ConfigError(f"{source} gave no credentials within {LOAD_SECONDS:.0f} s: log in by hand first") from error
    except (ConfigException, yaml.YAMLError, OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be used: {error}") from error
    except (AttributeError, KeyError, TypeError) as error:
        # What `kubernetes.aio` stumbles over when the file has another shape.
        raise ConfigError(f"{source} is not the configuration of a cluster: compare it with `kubectl config view`") from error


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
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    _take_identity(context, configuration)
    return context


def _take_identity(context: ssl.SSLContext, configuration: Any) -> None:
    """For connections made from now on."""
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)


def _own_namespace() -> str:
    try:
        return OWN_NAMESPACE.read_text().strip() or "default"
    except OSError:
        return "default"
