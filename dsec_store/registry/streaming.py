"""Sending a blob, or a range of it, in large blocks read by threads."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dsec_store.backends.base import Backend
from dsec_store.errors import BlobUnknown
from dsec_store.registry.ranges import Unsatisfiable, parse_range

log = logging.getLogger(__name__)

READ_BLOCK = 1 << 20
"""Bytes read and sent at once: a thread's hand-over costs 0.1 ms, which must not count."""


class BlobPart:
    """An open blob, or a range of it. Read in threads; closing waits for a read under way."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.offset = 0
        self.length = size
        self.partial = False
        self.unsatisfiable = False
        self.first = b""
        self._fd = -1
        self._stream: Iterator[bytes] | None = None
        self._lock = threading.Lock()

    @classmethod
    def open(cls, backend: Backend, digest: str, header: str | None) -> BlobPart:
        """Open, parse the range, and read the first block: small answers then cost one hand-over to a thread."""
        local_path: Callable[[str], Path] | None = getattr(backend, "local_path", None)
        fd = -1
        if local_path is not None:
            try:
                fd = os.open(local_path(digest), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise BlobUnknown(digest) from None
        try:
            part = cls(os.fstat(fd).st_size if fd >= 0 else backend.stat(digest))
            part._fd = fd
            found = parse_range(header, part.size)
            if found is not None:
                part.offset, part.length = found
                part.partial = True
            if fd < 0:
                part._stream = iter(backend.stream(digest, part.offset, part.length, READ_BLOCK))
            part.first = part.read(0)
        except Unsatisfiable:
            part.unsatisfiable = True
            part.close()
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        return part

    def read(self, done: int) -> bytes:
        """The block after ``done`` bytes; empty when the file ended too early."""
        with self._lock:
            if self._stream is not None:
                return next(self._stream, b"")
            if self._fd < 0:
                return b""
            return os.pread(self._fd, min(READ_BLOCK, self.length - done), self.offset + done)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
            close = getattr(self._stream, "close", None)
            self._stream = None
            if close is not None:
                close()


class BlobResponse(Response):
    """Sends a part of a blob in large blocks, reading the next one while the last one is being sent."""

    def __init__(self, pool: Executor, part: BlobPart, headers: dict[str, str]) -> None:
        headers["Content-Length"] = str(part.length)
        if part.partial:
            headers["Content-Range"] = f"bytes {part.offset}-{part.offset + part.length - 1}/{part.size}"
        super().__init__(None, 206 if part.partial else 200, headers, "application/octet-stream")
        self._pool = pool
        self._part = part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        part = self._part
        loop = asyncio.get_running_loop()
        reading: asyncio.Future[bytes] | None = None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            block, sent = part.first, 0
            while True:
                sent += len(block)
                more = sent < part.length
                if more and not block:
                    # Headers are out: ending the connection early is the only way left to say that it failed.
                    log.error("a blob ended after %d bytes, expected %d", part.offset + sent, part.size)
                    return
                reading = loop.run_in_executor(self._pool, part.read, sent) if more else None
                await send({"type": "http.response.body", "body": block, "more_body": more})
                if reading is None:
                    return
                block, reading = await reading, None
        finally:
            part.close()  # waits, for a millisecond at most, when this task was cancelled during a read
