"""Backends of the facade: LocalBackend over an Engine (docker, memory). Each implements `agent_sandbox_core.interfaces.Backend`."""
