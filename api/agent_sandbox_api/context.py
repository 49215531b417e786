"""What a request may borrow: made with the app, owned by its lifespan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

from agent_sandbox_core.interfaces import Backend
from fastapi import Depends, Request

from .metrics import Metrics
from .middleware import Lifecycle
from .policy import Policy
from .settings import Settings


@dataclass(frozen=True, slots=True)
class Context:
    """The resources of one app."""

    settings: Settings
    backend: Backend
    policy: Policy
    metrics: Metrics = field(default_factory=Metrics)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)


async def _borrow(request: Request) -> Context:
    return cast("Context", request.app.state.context)


Borrowed = Annotated[Context, Depends(_borrow)]
