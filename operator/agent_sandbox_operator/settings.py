"""Settings of the operator, from the environment. A bad one stops the start with one clear line."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

SHARED: Final = "AGENT_SANDBOX_"
PREFIX: Final = "AGENT_SANDBOX_OPERATOR_"
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")


class SettingsError(Exception):
    """A setting that cannot work. The message is one line and names the variable."""


def _read_list(value: object) -> object:
    if isinstance(value, str):
        return tuple(part for part in (part.strip() for part in value.split(",")) if part)
    return value


def shared(name: str) -> Any:
    """A setting that operator and mover share; its name has no component in it."""
    return AliasChoices(f"{SHARED}{name}", name.lower())


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_read_list)]


class OperatorSettings(BaseSettings):
    """Everything that the operator can be told. Names are those of the fields in upper case after AGENT_SANDBOX_OPERATOR_, but for the shared ones."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, populate_by_name=True, validate_default=True)

    namespaces: Names = Field(default=(), validation_alias=shared("NAMESPACES"))
    """AGENT_SANDBOX_NAMESPACES: the namespaces to look after; empty: all."""
    init_image: str = Field(default="", validation_alias=shared("INIT_IMAGE"))
    """AGENT_SANDBOX_INIT_IMAGE: the image with /sandbox-init, by digest where it comes from a registry."""
    init_delivery: Literal["auto", "image-volume", "init-container"] = Field(default="auto", validation_alias=shared("INIT_DELIVERY"))
    """AGENT_SANDBOX_INIT_DELIVERY: how sandbox-init gets into a pod. auto: by image volume, by init container where that does not work."""
    workers: int = Field(default=16, ge=1, le=256)
    """How many Sandboxes are worked on at a time."""
    resync_seconds: float = Field(default=300, ge=5, le=86_400)
    """How often everything is listed and looked at again."""
    health_host: str = "0.0.0.0"  # noqa: S104 - the kubelet asks the pod's address
    """Where /healthz, /readyz and /metrics listen."""
    health_port: int = Field(default=8081, ge=0, le=65535)
    """Their port; 0 chooses a free one and prints it."""
    lease: bool = True
    """Whether this process waits for the Lease before it works. Off only where there is never a second one."""
    lease_namespace: str = ""
    """Where the Lease is; empty: the pod's own namespace, or that of the kubeconfig's context."""
    lease_name: str = "agent-sandbox-operator"
    """Its name; another one for an operator of other namespaces."""
    user_namespaces: Literal["auto", "on", "off"] = "auto"
    """`hostUsers: false` in pods. auto: tried, and left out for a runtime class where a pod did not start with it."""
    require_network_enforcement: bool = False
    """Whether a Sandbox is Ready only when the network policies were seen to bite."""
    verify_network: bool = True
    """Whether canary pods check that, at the start and every hour."""
    canary_namespace: str = ""
    """Where they run; empty: the Lease's namespace."""
    blocked_networks: Names = ()
    """What an open network must not reach besides private, link-local and metadata ranges: nodes, API endpoints, service and pod ranges with public addresses."""
    tmp_size_mb: int = Field(default=256, ge=1, le=1 << 20)
    """Size of /tmp, which is memory and counts against the memory limit."""
    probe_seconds: float = Field(default=5.0, gt=0, le=60)
    """Longest wait for the first answer of sandbox-init over a channel, for one try."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the log."""
    log_format: Literal["text", "json"] = "text"
    """Form of its lines."""

    @field_validator("namespaces")
    @classmethod
    def _check_namespaces(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not _NAMESPACE.match(name):
                raise ValueError(f"{name!r} is no name of a namespace")
        return tuple(dict.fromkeys(value))

    @field_validator("blocked_networks")
    @classmethod
    def _check_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ipaddress.ip_network(text, strict=False)) for text in value)

    @field_validator("init_image")
    @classmethod
    def _check_image(cls, value: str) -> str:
        if not value:
            raise ValueError("must name the image that holds /sandbox-init")
        return value


Loaded = TypeVar("Loaded", bound=BaseSettings)


def load_settings(**given: Any) -> OperatorSettings:
    """From the environment, with some given. Raises SettingsError."""
    return read_settings(OperatorSettings, given)


def read_settings(kind: type[Loaded], given: Mapping[str, Any]) -> Loaded:
    """Settings of that kind from the environment, with some given. Raises SettingsError, which names the variable of the first that cannot work."""
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else "a setting"
        field = kind.model_fields.get(name)
        prefix = SHARED if field is not None and field.validation_alias is not None else kind.model_config["env_prefix"]
        variable = name if name.startswith(SHARED) else f"{prefix}{name.upper()}"
        raise SettingsError(f"{variable}: {first['msg'].removeprefix('Value error, ')}") from error
