"""``run/node.sock``: what the node tells and what it can be told, over HTTP.

GET /v1/status, GET /v1/stats, POST /v1/stop?force=0|1. Errors are ``{"error": one line}``.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dsec_store.errors import DsecError
from dsec_store.node.core import Node


class JSONResponse(Response):
    """JSON in ASCII: a path that is not UTF-8 has surrogates, which no encoding takes."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return json.dumps(content).encode()


def create_app(node: Node, stop: Callable[[], None]) -> Starlette:
    """The node's application; ``stop`` ends the service after the answer."""

    async def status(request: Request) -> JSONResponse:
        await run_in_threadpool(node.reap)
        return JSONResponse(await run_in_threadpool(node.status))

    async def stats(request: Request) -> JSONResponse:
        return JSONResponse(await run_in_threadpool(node.stats))

    async def halt(request: Request) -> JSONResponse:
        await run_in_threadpool(node.reap)
        busy = await run_in_threadpool(node.busy)
        if busy and request.query_params.get("force") != "1":
            one = f"{len(busy)} environment{'s are' if len(busy) > 1 else ' is'}"
            who = ", ".join(busy[:5])
            message = f"{one} still mounted ({who}); readers of layers on demand would get errors: see --force"
            return JSONResponse({"error": message}, 409)
        stop()
        return JSONResponse({"stopping": True})

    async def refused(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 400)

    return Starlette(
        routes=[
            Route("/v1/status", status),
            Route("/v1/stats", stats),
            Route("/v1/stop", halt, methods=["POST"]),
        ],
        exception_handlers={DsecError: refused},
    )
