"""The HTTP client of a node: plain HTTP at once, TLS when the first https address is asked for.

Loading the certificates of the authorities takes 50 ms and more, which a sandbox that starts from a plain registry
should not wait for; a redirect to https is still verified as it must be.
"""

from __future__ import annotations

import httpx

CONNECTIONS = 64
KEEP_ALIVE = 60.0
"""Seconds for which an idle connection is kept: a new one costs a round trip."""

_LIMITS = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=32, keepalive_expiry=KEEP_ALIVE)


class _VerifiedTls(httpx.AsyncBaseTransport):
    """An ordinary verifying transport, made at its first request."""

    def __init__(self) -> None:
        self._transport: httpx.AsyncHTTPTransport | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._transport is None:
            self._transport = httpx.AsyncHTTPTransport(limits=_LIMITS)
        return await self._transport.handle_async_request(request)

    async def aclose(self) -> None:
        if self._transport is not None:
            await self._transport.aclose()


def make_client(timeout: float) -> httpx.AsyncClient:
    """A client for all registries. ``timeout`` is how many seconds a connection, or a silence, may last."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(timeout),
        transport=httpx.AsyncHTTPTransport(limits=_LIMITS, verify=False),  # never sees https, see mounts
        mounts={"https://": _VerifiedTls()},
        follow_redirects=True,
        trust_env=False,
    )
