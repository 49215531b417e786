"""Settings of the mover, from the environment. A bad one stops the start with one clear line."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from agent_sandbox_operator.settings import Names, read_settings, shared

PREFIX: Final = "AGENT_SANDBOX_MOVER_"


class MoverSettings(BaseSettings):
    """Everything that the mover can be told. Names are those of the fields in upper case after AGENT_SANDBOX_MOVER_, but for the shared ones."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, populate_by_name=True, validate_default=True)

    namespaces: Names = Field(default=(), validation_alias=shared("NAMESPACES"))
    """AGENT_SANDBOX_NAMESPACES: the namespaces to look after; empty: all."""
    store_url: str = Field(default="", validation_alias=shared("STORE_URL"))
    """AGENT_SANDBOX_STORE_URL: where snapshots are kept, `file:///directory`, `s3://bucket/prefix` and what else obstore knows. Its credentials come
    from the environment as obstore documents it (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL …)."""
    installation: str = Field(default="", validation_alias=shared("INSTALLATION"))
    """AGENT_SANDBOX_INSTALLATION: the folder in the store that is this installation's alone; empty: the uid of the namespace kube-system."""
    max_snapshot_bytes: int = Field(default=1 << 30, ge=1 << 20, validation_alias=shared("MAX_SNAPSHOT_BYTES"))
    """AGENT_SANDBOX_MAX_SNAPSHOT_BYTES: the largest workspace that is kept or brought back, as an uncompressed tar."""
    spool: Path | None = None
    """A directory with room for the archives on their way. Unset: `.spool` in a directory store, else below the system's temporary directory."""
    transfers: int = Field(default=4, ge=1, le=64)
    """How many archives are on their way at a time; each takes about 4 MiB of memory, with an object store 24 MiB."""
    workers: int = Field(default=16, ge=1, le=256)
    """How many Snapshots and Sandboxes are looked at at a time."""
    patience_seconds: float = Field(default=120.0, ge=0, le=3600)
    """How long a store or a sandbox that does not answer is tried again."""
    resync_seconds: float = Field(default=300.0, ge=5, le=86_400)
    """How often everything is looked at again."""
    sweep_seconds: float = Field(default=3600.0, ge=1, le=86_400)
    """How often the store is compared with the Snapshots."""
    stray_seconds: float = Field(default=3600.0, ge=0, le=86_400)
    """What has no Snapshot is left alone when it is younger."""
    trash_seconds: float = Field(default=86_400.0, ge=0, le=31_536_000)
    """How long what has no Snapshot stays in the trash."""
    health_host: str = "0.0.0.0"  # noqa: S104 - the kubelet asks the pod's address
    """Where /healthz and /readyz listen."""
    health_port: int = Field(default=8082, ge=0, le=65535)
    """Their port; 0 chooses a free one and prints it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the log."""
    log_format: Literal["text", "json"] = "text"
    """Form of its lines."""

    @field_validator("store_url")
    @classmethod
    def _check_store(cls, value: str) -> str:
        parts = urlsplit(value)
        if not parts.scheme:
            raise ValueError("must be the address of the snapshot store, e.g. file:///var/lib/agent-sandbox or s3://bucket/prefix")
        if parts.scheme == "file" and not unquote(parts.path).strip("/"):
            raise ValueError("must name a directory below the root, e.g. file:///var/lib/agent-sandbox")
        return value

    @property
    def spool_directory(self) -> Path:
        """Where archives are on their way. In a directory store it is on the same disk, so that a finished one is only renamed."""
        if self.spool is not None:
            return self.spool
        parts = urlsplit(self.store_url)
        return Path(unquote(parts.path)) / ".spool" if parts.scheme == "file" else Path(tempfile.gettempdir()) / "agent-sandbox-mover"


def load_mover_settings(**given: Any) -> MoverSettings:
    """From the environment, with some given. Raises SettingsError."""
    return read_settings(MoverSettings, given)
