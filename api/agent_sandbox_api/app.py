"""The app: routes over a backend, with everything around them. Nothing here is global; two apps can live in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agent_sandbox_core.errors import SandboxError
from agent_sandbox_core.interfaces import Backend
from agent_sandbox_core.version import __version__
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from .answers import answer_http_error, answer_sandbox_error, answer_schema_error
from .context import Context
from .middleware import BodyLimit, Envelope, KeyCheck
from .openapi import DESCRIPTION, TAGS, build_schema
from .policy import Policy
from .routes import commands, files, sandboxes, service, snapshots
from .settings import Settings


def create_app(settings: Settings, backend: Backend) -> FastAPI:
    """The facade over `backend`, which its lifespan starts and closes."""
    context = Context(settings, backend, Policy(settings, backend.max_cpus))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            await backend.start()
            yield
        finally:
            await backend.close()

    app = FastAPI(
        title="agent-sandbox",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        lifespan=lifespan,
        redoc_url=None,
        exception_handlers={
            SandboxError: answer_sandbox_error,
            HTTPException: answer_http_error,
            RequestValidationError: answer_schema_error,
        },
    )
    app.state.context = context
    # In the order of use: routes are tried one after another.
    for module in (commands, files, sandboxes, snapshots, service):
        app.include_router(module.router)
    # The last one added is the outermost.
    app.add_middleware(BodyLimit)
    app.add_middleware(KeyCheck, keys=[key.get_secret_value() for key in settings.api_keys])
    app.add_middleware(Envelope, metrics=context.metrics, lifecycle=context.lifecycle)

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build_schema(app)
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way to extend the schema
    return app
