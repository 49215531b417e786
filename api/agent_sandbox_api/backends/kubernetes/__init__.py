"""Sandboxes as custom resources. The operator makes pods of them; this backend edits the resources and opens channels to the pods."""

from .backend import KubernetesBackend, KubernetesOptions

__all__ = ["KubernetesBackend", "KubernetesOptions"]
