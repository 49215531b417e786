"""Settings of the facade, from the environment (prefix AGENT_SANDBOX_). A bad one stops the start with one clear line that shows no key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from .images import is_allowed, is_reference

PREFIX: Final = "AGENT_SANDBOX_"
MIN_KEY_CHARACTERS: Final = 16
_DAY: Final = 86_400
_YEAR: Final = 366 * _DAY
_MAX_BYTES: Final = 1 << 44
_USER = re.compile(r"([0-9]{1,10}):([0-9]{1,10})\Z")
_MAX_ID: Final = (1 << 32) - 2
_WORDS: Final = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False, "": False}
# Default and maximum of each pair: the first must fit into the second.
_PAIRS: Final = ("timeout_seconds", "cpus", "memory_mb", "pids_limit", "exec_timeout_seconds")


class SettingsError(Exception):
    """A setting that cannot work. The message is one line, names the variable and holds no key."""


def _read_switch(value: object) -> object:
    if isinstance(value, str):
        word = _WORDS.get(value.strip().lower())
        if word is None:
            raise ValueError("must be one of 1, true, yes, on, 0, false, no, off, or empty")
        return word
    return value


def _read_list(value: object) -> object:
    if isinstance(value, str):
        return [part for part in (part.strip() for part in value.split(",")) if part]
    return value


Switch = Annotated[bool, BeforeValidator(_read_switch)]
Seconds = Annotated[int, Field(ge=1, le=_YEAR)]
Bytes = Annotated[int, Field(ge=1, le=_MAX_BYTES)]
Cpus = Annotated[float, Field(gt=0, le=4096, allow_inf_nan=False)]
MemoryMb = Annotated[int, Field(ge=16, le=1 << 26)]
Pids = Annotated[int, Field(ge=8, le=1 << 22)]


class Settings(BaseSettings):
    """Everything that the facade can be told. Field names are the variables' names in lower case, without the prefix."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, validate_default=True, hide_input_in_errors=True)

    api_keys: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_read_list)] = ()
    insecure_no_auth: Switch = False
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8080, ge=1, le=65535)
    data_dir: Path = Path("./data")
    store_url: str = ""
    """Where snapshots lie: empty for DATA_DIR/snapshots, else a URL of an object store."""
    backend: Literal["auto", "docker", "kubernetes", "memory"] = "auto"

    default_image: str = "python:3.12-slim"
    allowed_images: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_read_list)] = ("*",)
    allow_network: Switch = True
    max_sandboxes: int = Field(default=20, ge=1, le=100_000)
    default_timeout_seconds: Seconds = 900
    max_timeout_seconds: Seconds = _DAY
    default_cpus: Cpus = 1
    max_cpus: Cpus = 4
    default_memory_mb: MemoryMb = 512
    max_memory_mb: MemoryMb = 4096
    default_pids_limit: Pids = 256
    max_pids_limit: Pids = 4096
    default_exec_timeout_seconds: float = Field(default=60, gt=0, le=_YEAR, allow_inf_nan=False)
    max_exec_timeout_seconds: float = Field(default=3600, gt=0, le=_YEAR, allow_inf_nan=False)
    max_exec_output_bytes: Bytes = 10 << 20
    max_file_bytes: Bytes = 50 << 20
    max_snapshot_bytes: Bytes = 1 << 30
    reap_interval_seconds: float = Field(default=10, ge=0.05, le=3600, allow_inf_nan=False)
    shutdown_seconds: float = Field(default=10, ge=0, le=600, allow_inf_nan=False)
    """How long requests that run may go on after SIGTERM."""

    sandbox_user: str = "1000:1000"
    tmp_size_mb: int = Field(default=256, ge=1, le=1 << 20)
    docker_runtime: str = Field(default="", pattern=r"\A[A-Za-z0-9._/-]{0,200}\z")
    network_name: str = Field(default="agent-sandbox-net", pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\z")

    namespace: str = Field(default="", pattern=r"\A([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?\z")
    workspace_size: str = Field(default="1Gi", pattern=r"\A[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?\z")
    storage_class: str = Field(default="", max_length=253)
    workspace_ephemeral: Switch = False
    runtime_class: str = Field(default="", max_length=253)
    create_seconds: float = Field(default=180, ge=1, le=3600, allow_inf_nan=False)
    """How long a create may wait for its sandbox on a cluster, pulls of images included."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "text"] = "json"

    @property
    def user_ids(self) -> tuple[int, int]:
        """uid and gid of the sandbox's user."""
        uid, gid = self.sandbox_user.split(":")
        return int(uid), int(gid)

    @field_validator("api_keys", "allowed_images", mode="after")
    @classmethod
    def _check_lists(cls, value: tuple[Any, ...], info: ValidationInfo) -> tuple[Any, ...]:
        if info.field_name == "allowed_images":
            if not value:
                raise ValueError("allows no image at all: give globs, or * for every image")
            return value
        for number, key in enumerate(value, 1):
            text = key.get_secret_value()
            if len(text) < MIN_KEY_CHARACTERS:
                raise ValueError(f"key {number} of {len(value)} has {len(text)} characters; a key needs at least {MIN_KEY_CHARACTERS}")
            if not text.isascii() or not text.isprintable() or " " in text:
                raise ValueError(f"key {number} of {len(value)} holds a character that cannot be sent in a header: use printable ASCII")
        return value

    @field_validator("log_level", "log_format", "backend", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.strip().lower() if isinstance(value, str) else value

    @field_validator("sandbox_user")
    @classmethod
    def _check_user(cls, value: str) -> str:
        found = _USER.match(value)
        if not found or any(int(part) > _MAX_ID for part in found.groups()):
            raise ValueError("must be uid:gid as two numbers, like 1000:1000")
        return value

    @field_validator("default_image")
    @classmethod
    def _check_image(cls, value: str) -> str:
        if not is_reference(value):
            raise ValueError("is no image reference; write it like python:3.12-slim")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        for pair in _PAIRS:
            default, most = getattr(self, f"default_{pair}"), getattr(self, f"max_{pair}")
            if default > most and f"default_{pair}" not in self.model_fields_set:
                # Whoever lowers a maximum alone means the built-in default to follow.
                object.__setattr__(self, f"default_{pair}", most)
            elif default > most:
                raise ValueError(_told(f"default_{pair}", f"is {default:g}, over {PREFIX}MAX_{pair.upper()} ({most:g})"))
        if not is_allowed(self.default_image, self.allowed_images):
            raise ValueError(_told("default_image", f"{self.default_image} is matched by no glob of {PREFIX}ALLOWED_IMAGES"))
        if not self.api_keys and not self.insecure_no_auth:
            raise ValueError(
                _told("api_keys", f"is empty: set keys of {MIN_KEY_CHARACTERS} or more characters, or {PREFIX}INSECURE_NO_AUTH=true to serve without")
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment alone: no file in the current folder may change how a service starts."""
        return init_settings, env_settings


def load_settings(**given: Any) -> Settings:
    """Settings from the environment, `given` ones first. SettingsError, one line, when one of them cannot work."""
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("; ".join(_line(detail) for detail in error.errors(include_input=False, include_url=False))) from None


def _told(field: str, text: str) -> str:
    return f"{PREFIX}{field.upper()}: {text}"


def _line(detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ").replace("\n", " ")
    place = str(detail["loc"][0]) if detail["loc"] else ""
    return _told(place, message[:1].lower() + message[1:]) if place else message
