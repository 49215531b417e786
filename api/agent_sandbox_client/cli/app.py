"""The commands by name, loaded when they are called, so that help and completion are quick."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any, Final, NamedTuple

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from .target import PLUGIN, Backend, Key, Namespace, Target, Url

PROGRAM: Final = "sandboxctl"
PLUGIN_PROGRAM: Final = "kubectl sandbox"


class Entry(NamedTuple):
    """Where a command is, and what it does in one line."""

    module: str
    summary: str


SECTIONS: Final[dict[str, dict[str, Entry]]] = {
    "Sandboxes": {
        "create": Entry("sandboxes", "Create a sandbox and print its id."),
        "list": Entry("sandboxes", "List sandboxes."),
        "get": Entry("sandboxes", "Show a sandbox."),
        "timeout": Entry("sandboxes", "Set how long a sandbox lives, counted from now."),
        "delete": Entry("sandboxes", "Delete sandboxes; their snapshots stay."),
    },
    "Commands": {
        "exec": Entry("commands", "Run a command, with its output and its exit code."),
    },
    "State": {
        "snapshot": Entry("snapshots", "Take, list, show and delete snapshots."),
        "rollback": Entry("sandboxes", "Put a snapshot's files back into a sandbox."),
        "fork": Entry("sandboxes", "Create sandboxes from a snapshot and print their ids."),
    },
    "Service": {
        "doctor": Entry("doctor", "Check the server, the engine and the cluster, and say what to fix."),
        "serve": Entry("service", "Run the HTTP API. Settings come from the environment (AGENT_SANDBOX_*)."),
        "operator": Entry("service", "Run the operator of the custom resources. Settings come from the environment."),
        "mover": Entry("service", "Carry out Snapshots and restores. Settings come from the environment."),
        "openapi": Entry("service", "Print the OpenAPI schema of the HTTP API."),
        "version": Entry("service", "Print the version."),
    },
}
COMMANDS: Final = {name: entry for section in SECTIONS.values() for name, entry in section.items()}


class Commands(MutableMapping[str, Any]):
    """Commands that are loaded when somebody looks at them."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)

    def _load(self, name: str) -> Any:
        module = importlib.import_module(f".{COMMANDS[name].module}", __package__)
        group = get_group(module.app)
        # A module is the command of its name, or has it.
        return group if group.name == name else group.commands[name]


class RootGroup(TyperGroup):
    """The commands in sections."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, section in SECTIONS.items():
            with formatter.section(title):
                # One width for all sections.
                formatter.write_dl([(name.ljust(10), entry.summary) for name, entry in section.items()])


root = typer.Typer(
    cls=RootGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@root.callback()
def connect(ctx: typer.Context, url: Url = None, api_key: Key = None, backend: Backend = None, namespace: Namespace = None) -> None:
    """Sandboxes for AI agents' code.

    Works with a server (--url, or AGENT_SANDBOX_URL), or without one: --backend docker or --backend kubernetes.
    These options may stand before or after the command. Every command has --json.
    """
    ctx.obj = Target(url=url, api_key=api_key, backend=backend, namespace=namespace)


def main() -> None:
    """The entry point of sandboxctl."""
    _run(PROGRAM)


def kubectl_main() -> None:
    """The entry point of the kubectl plugin: without other orders it works with the cluster of the kubeconfig."""
    os.environ[PLUGIN] = "1"
    _run(PLUGIN_PROGRAM)


def _run(name: str) -> None:
    try:
        # The variable that shells set for completion must be the same under both names.
        get_command(root)(prog_name=name, complete_var="_SANDBOXCTL_COMPLETE" if name == PROGRAM else "_KUBECTL_SANDBOX_COMPLETE")
    finally:
        sys.stdout.flush()
