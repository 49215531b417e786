"""The Docker engine: sandboxes as containers. The only package that knows docker; it knows no quotas, no snapshots and no HTTP of ours."""

from .engine import DockerEngine
from .options import DockerOptions

__all__ = ["DockerEngine", "DockerOptions"]
