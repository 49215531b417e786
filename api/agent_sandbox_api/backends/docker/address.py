"""Where the engine is: DOCKER_HOST, else the context of the docker command line, else the default socket."""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from agent_sandbox_core.errors import BackendError

DEFAULT_SOCKET = "unix:///var/run/docker.sock"
PLAIN_PORT, TLS_PORT = 2375, 2376


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a TLS connection; None where the system's own or none is meant."""

    ca: Path | None
    certificate: Path | None
    key: Path | None
    verify: bool

    def context(self) -> ssl.SSLContext:
        """A client context of these files; BackendError that names the file which does not work."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            used = ", ".join(str(path) for path in (self.ca, self.certificate, self.key) if path is not None)
            raise BackendError(f"the TLS files for the Docker engine cannot be used ({used}): {error}: check DOCKER_CERT_PATH") from error
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


@dataclass(frozen=True, slots=True)
class Address:
    """One engine. `text` is what messages show: the address without any credentials."""

    kind: Literal["unix", "tcp", "ssh"]
    text: str
    path: str = ""
    host: str = ""
    port: int | None = None
    user: str | None = None
    tls: TlsFiles | None = None

    def ssh_command(self) -> list[str]:
        """Runs the docker command line over there, as a bridge to its engine: `docker system dial-stdio`, as the docker client does."""
        command = ["ssh", "-T", "-o", "ConnectTimeout=20", "-o", "BatchMode=yes"]
        if self.user:
            command += ["-l", self.user]
        if self.port:
            command += ["-p", str(self.port)]
        command += ["--", self.host, "docker"]
        if self.path:
            command += ["--host", f"unix://{self.path}"]
        return [*command, "system", "dial-stdio"]


def find_address(environment: Mapping[str, str], host: str | None = None) -> Address:
    """The engine of this environment. The order is that of the docker command line: DOCKER_HOST, DOCKER_CONTEXT, its current context."""
    folder = Path(environment.get("DOCKER_CONFIG") or Path(environment.get("HOME") or "/") / ".docker")
    chosen = host or environment.get("DOCKER_HOST")
    if chosen:
        wants_tls = bool(environment.get("DOCKER_TLS_VERIFY") or environment.get("DOCKER_TLS"))
        certificates = Path(environment.get("DOCKER_CERT_PATH") or folder)
        tls = find_tls(certificates, verify=bool(environment.get("DOCKER_TLS_VERIFY"))) if wants_tls else None
        return parse_address(chosen, tls)
    context = environment.get("DOCKER_CONTEXT") or read_json(folder / "config.json").get("currentContext") or "default"
    if context == "default":
        return parse_address(DEFAULT_SOCKET, None)
    return find_context(folder, str(context))


def find_context(folder: Path, name: str) -> Address:
    """The engine of a context of the docker command line, with its TLS files."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    endpoint = read_json(folder / "contexts" / "meta" / digest / "meta.json").get("Endpoints", {}).get("docker", {})
    if not endpoint.get("Host"):
        raise BackendError(f"the docker context {name} has no endpoint: look at `docker context ls`, or set DOCKER_HOST")
    certificates = folder / "contexts" / "tls" / digest / "docker"
    tls = find_tls(certificates, verify=not endpoint.get("SkipTLSVerify", False)) if certificates.is_dir() else None
    return parse_address(str(endpoint["Host"]), tls)


def parse_address(text: str, tls: TlsFiles | None) -> Address:
    """An address in the form of DOCKER_HOST; BackendError when it is none that can be used here."""
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError as error:
        raise BackendError(f"the Docker address {text!r} has no usable port: {error}") from error
    if parts.scheme == "unix" and parts.path:
        return Address("unix", f"unix://{parts.path}", path=parts.path)
    if parts.scheme == "tcp" and parts.hostname:
        port = port or (TLS_PORT if tls else PLAIN_PORT)
        return Address("tcp", f"tcp://{parts.hostname}:{port}", host=parts.hostname, port=port, tls=tls)
    if parts.scheme == "ssh" and parts.hostname:
        path = parts.path if parts.path != "/" else ""
        return Address("ssh", f"ssh://{parts.hostname}", path=path, host=parts.hostname, port=port, user=parts.username)
    raise BackendError(f"the Docker address {text!r} cannot be used: it must begin with unix://, tcp:// or ssh:// (set DOCKER_HOST)")


def find_tls(folder: Path, *, verify: bool) -> TlsFiles:
    """The usual files of a certificate folder, those of them that are there."""
    files = {name: folder / f"{name}.pem" for name in ("ca", "cert", "key")}
    present = {name: path if path.is_file() else None for name, path in files.items()}
    return TlsFiles(present["ca"], present["cert"], present["key"], verify)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no such file or it holds something else."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
