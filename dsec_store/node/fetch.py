"""Fetch missing chunks of a data blob: one fetch per chunk however many readers wait, adjacent misses in one request.

A fetcher belongs to one blob and lives on the node's event loop. Chunks that are asked for wait in a queue until a
slot of their source is free; the request that then starts takes every waiting chunk that lies next to the first
one, up to MAX_REQUEST stored bytes. Each chunk is decoded and checked as soon as its bytes have come, kept in the
cache, and given to whoever waits. What fails is asked for again inside one overall deadline; a chunk whose bytes
are wrong twice is an error for its readers, never bytes.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from dsec_store.chunks import CHUNK, ZSTD, ChunkTable
from dsec_store.dataobject import decode_chunk, decode_raw_chunk
from dsec_store.errors import BlobUnknown, DsecError, IntegrityError, RegistryError
from dsec_store.node.cache import CacheEntry
from dsec_store.node.log import Log
from dsec_store.node.sources import Source
from dsec_store.node.stats import LayerStats

MAX_REQUEST = 4 << 20
"""Bytes of stored chunks that one request asks for at most: large enough to hide a round trip, small enough to share a
link.
"""
DEADLINE = 30.0
"""Seconds after which the readers of a chunk get EIO."""
SMALL_LAYER = 4 << 20
"""Bytes of stored chunks up to which a layer is fetched whole when it is mounted: one round trip instead of many."""
RECENT_MAX = 32
"""Chunks of a layer that are held in memory when the cache cannot keep them."""
AHEAD_MAX = 4
"""Chunks behind a miss that are fetched with it at most."""
AHEAD_TRIAL = 16
"""Chunks that are fetched ahead, two behind each miss, before it is judged whether that pays."""
HOLD = 5.0
"""Seconds for which a failure is told again without asking: of a source that is down, and of a chunk that is bad."""
ATTEMPTS_WRONG = 2
FINAL_STATUS = frozenset({200, 401, 403, 404, 416})
"""Answers that asking again will not change."""

log = Log("dsec.node")


class Slots:
    """The requests that may be under way to one source, shared by all blobs that come from it.

    A source that did not answer within the deadline is taken for down for ``HOLD`` seconds: the kernel asks again page
    by page after an error, and each of those reads would otherwise wait for a deadline of its own.
    """

    def __init__(self, count: int) -> None:
        self.free = count
        self.waiting: list[Fetcher] = []
        self._down: tuple[float, DsecError] | None = None

    def down(self) -> DsecError | None:
        """Why nothing is asked of the source now, or None."""
        if self._down is not None and time.monotonic() < self._down[0]:
            return self._down[1]
        return None

    def failed(self, error: DsecError) -> None:
        self._down = (time.monotonic() + HOLD, error)

    def answered(self) -> None:
        self._down = None

    def release(self) -> None:
        self.free += 1
        while self.free and self.waiting:
            self.waiting.pop(0).dispatch()


class Recent:
    """The last chunks that the cache could not keep, so that a full disk does not fetch a chunk anew for each page of
    it.
    """

    def __init__(self) -> None:
        self._chunks: dict[int, bytes] = {}
        self._lock = threading.Lock()

    def get(self, index: int) -> bytes | None:
        return self._chunks.get(index)

    def put(self, index: int, data: bytes) -> None:
        with self._lock:
            self._chunks[index] = data
            while len(self._chunks) > RECENT_MAX:
                del self._chunks[next(iter(self._chunks))]


class Fetcher:
    """Chunks of one blob (``digest`` is the data object's) from one source into one cache entry."""

    def __init__(
        self,
        *,
        layer: str,
        digest: str,
        table: ChunkTable,
        source: Source,
        slots: Slots,
        cache: CacheEntry | None,
        stats: LayerStats,
        executor: ThreadPoolExecutor,
        deadline: float = DEADLINE,
    ) -> None:
        self._layer = layer
        self._digest = digest
        self._table = table
        self._source = source
        self._slots = slots
        self._cache = cache
        self._stats = stats
        self._executor = executor
        self._deadline = deadline
        self._pending: dict[int, asyncio.Future[bytes]] = {}
        self._queue: dict[int, None] = {}  # in the order of asking
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduled = False
        self._bad: dict[int, tuple[float, DsecError]] = {}
        self.recent = Recent()
        self.ahead: set[int] = set()  # fetched, or on the way, before anybody asked

    async def get(self, indexes: Iterable[int]) -> list[bytes]:
        """The chunks' bytes, in the order of ``indexes``. Raises DsecError for the first that cannot be had."""
        futures = [self._want(index) for index in indexes]
        try:
            return [await asyncio.shield(future) for future in futures]
        finally:
            for future in futures:
                future.add_done_callback(_retrieve)

    def _want(self, index: int) -> asyncio.Future[bytes]:
        future = self._pending.get(index)
        if future is None:
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            if (error := self._known_error(index)) is not None:
                future.set_exception(error)
                return future
            self._pending[index] = future
            self._queue[index] = None
            if not self._scheduled:  # after the callbacks that are due now, so that their misses join
                self._scheduled = True
                loop.call_soon(self.dispatch)
        return future

    def prefetch_all(self) -> None:
        """Fetch what is not here yet, without a reader; on the loop."""
        for index in range(len(self._table)):
            if not self._here(index) and not self._known_error(index):
                self._expect(index)

    def used(self, index: int) -> None:
        """A reader came to a chunk of ``ahead``; from any thread."""
        if index in self.ahead:
            self.ahead.discard(index)
            self._stats.add(ahead_used=1)

    def _here(self, index: int) -> bool:
        return (
            index in self._pending
            or self._table.record(index).zero
            or (self._cache is not None and self._cache.has(index))
        )

    def _expect(self, index: int) -> None:
        """Queue a chunk that nobody waits for."""
        self.ahead.add(index)
        self._stats.add(ahead=1)
        self._want(index).add_done_callback(_retrieve)

    def _window(self) -> int:
        """How many chunks to fetch behind a miss: more when those fetched before were used, none when they were not.

        A further chunk costs its transfer; the miss that it saves costs a round trip as well. So it pays from about one
        in five on.
        """
        if self._cache is None:
            return 0
        if self._stats.ahead < AHEAD_TRIAL:
            return 2
        share = self._stats.ahead_used / self._stats.ahead
        return 0 if share < 0.15 else 1 if share < 0.3 else 2 if share < 0.5 else 3 if share < 0.7 else AHEAD_MAX

    def _known_error(self, index: int) -> DsecError | None:
        held = self._bad.get(index)
        if held is not None:
            if time.monotonic() < held[0]:
                return held[1]
            del self._bad[index]
        return self._slots.down()

    def dispatch(self) -> None:
        """Start as many requests as there are free slots and waiting chunks."""
        self._scheduled = False
        while self._queue and self._slots.free:
            run = self._take_run()
            self._slots.free -= 1
            task = asyncio.get_running_loop().create_task(self._fetch(run))
            self._tasks.add(task)
            task.add_done_callback(self._finished)
        if self._queue and self not in self._slots.waiting:
            self._slots.waiting.append(self)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("fetch failed by a fault of ours", layer=self._layer, error=repr(error))

    def _take_run(self) -> list[int]:
        first = next(iter(self._queue))
        run = [first]
        size = self._table.record(first).length
        for step in (1, -1):
            index = first + step
            while (
                index in self._queue
                and size + self._table.record(index).length <= MAX_REQUEST
                and self._adjacent(index, step)
            ):
                size += self._table.record(index).length
                run.append(index)
                index += step
        for index in run:
            del self._queue[index]
        run.sort()
        for index in range(run[-1] + 1, min(run[-1] + 1 + self._window(), len(self._table))):
            if (
                self._here(index)
                or self._known_error(index)
                or size + self._table.record(index).length > MAX_REQUEST
                or not self._adjacent(index, 1)
            ):
                break
            self._expect(index)
            del self._queue[index]
            size += self._table.record(index).length
            run.append(index)
        return run

    def _adjacent(self, index: int, step: int) -> bool:
        """Whether the chunk's stored bytes touch those of its neighbour on the side of the run."""
        low = min(index, index - step)
        before = self._table.record(low)
        return before.offset + before.length == self._table.record(low + 1).offset

    async def _fetch(self, run: list[int]) -> None:
        """One run until every chunk has its bytes or its error."""
        loop = asyncio.get_running_loop()
        end = time.monotonic() + self._deadline
        wrong: dict[int, int] = {}
        failures = 0
        try:
            while run:
                error: DsecError | None = None
                part = self._without_gaps(run)
                try:
                    # what the thread tells the loop comes before its own end
                    await loop.run_in_executor(self._executor, self._request, part, wrong, end, loop)
                except DsecError as caught:
                    error = caught
                except OSError as caught:
                    error = DsecError(f"cannot read from {self._source.name}: {caught}")
                run = [index for index in run if index in self._pending]
                if error is None:
                    continue
                failures += 1
                final = isinstance(error, BlobUnknown) or (
                    isinstance(error, RegistryError) and error.status in FINAL_STATUS
                )
                pause = random.uniform(0.5, 1.0) * min(0.1 * 2**failures, 2.0)
                if final or time.monotonic() + pause >= end:
                    self._stats.add(errors=1)
                    log.error(
                        "chunks could not be fetched",
                        layer=self._layer,
                        chunks=_span(run),
                        attempts=failures,
                        reason=error,
                    )
                    if isinstance(error, RegistryError) and not final:
                        self._slots.failed(error)
                    for index in run:
                        self._fail(index, error)
                    run = []
                    continue
                log.warning("fetching again", layer=self._layer, chunks=_span(run), attempt=failures, reason=error)
                await asyncio.sleep(pause)
        finally:
            for index in run:  # cancelled, or a fault of ours: no reader may wait for ever
                self._fail(index, DsecError(f"the fetch of chunk {index} of layer {self._layer} was given up"))

    def _request(self, run: list[int], wrong: dict[int, int], end: float, loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: one range request; each chunk is settled as soon as its bytes have come."""
        start, last = self._table.record(run[0]).offset, self._table.record(run[-1])
        self._stats.add(requests=1)
        buffer = bytearray()
        position = 0
        for block in self._source.stream(self._digest, start, last.offset + last.length - start, end):
            self._stats.add(bytes_fetched=len(block))
            buffer += block
            consumed = 0
            while position < len(run) and len(buffer) - consumed >= (size := self._table.record(run[position]).length):
                stored = bytes(memoryview(buffer)[consumed : consumed + size])
                consumed += size
                self._settle(run[position], stored, wrong, loop)
                position += 1
            if consumed:
                del buffer[:consumed]

    def _without_gaps(self, run: list[int]) -> list[int]:
        for position in range(1, len(run)):
            if run[position] != run[position - 1] + 1 or not self._adjacent(run[position], 1):
                return run[:position]
        return run

    def _settle(self, index: int, stored: bytes, wrong: dict[int, int], loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a thread: decompress, check, keep, and tell the loop."""
        decode = decode_chunk if self._table.encoding == ZSTD else decode_raw_chunk
        try:
            data = decode(stored, self._table.chunk_size(index), self._table.record(index).digest)
        except IntegrityError as error:
            wrong[index] = wrong.get(index, 0) + 1
            self._stats.add(wrong_chunks=1)
            log.warning(
                "a chunk has wrong bytes", layer=self._layer, chunk=index, source=self._source.name, reason=error
            )
            if wrong[index] >= ATTEMPTS_WRONG:
                self._stats.add(errors=1)
                loop.call_soon_threadsafe(self._fail, index, error)
            return
        if self._cache is None or not self._cache.put(index, data):
            self._stats.add(not_kept=1)
            self.recent.put(index, data)
        loop.call_soon_threadsafe(self._have, index, data)

    def _have(self, index: int, data: bytes) -> None:
        self._slots.answered()
        future = self._pending.pop(index, None)
        if future is not None and not future.done():
            future.set_result(data)

    def _fail(self, index: int, error: DsecError) -> None:
        self._bad[index] = (time.monotonic() + HOLD, error)
        self._queue.pop(index, None)
        future = self._pending.pop(index, None)
        if future is not None and not future.done():
            future.set_exception(error)

    async def close(self) -> None:
        """Cancel what is under way; its readers get an error."""
        for index in list(self._pending):
            self._fail(index, DsecError(f"the fetch of chunk {index} of layer {self._layer} was given up"))
        if self in self._slots.waiting:
            self._slots.waiting.remove(self)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _retrieve(future: asyncio.Future[bytes]) -> None:
    if not future.cancelled():
        future.exception()  # several readers may share one failure; none must be reported as never retrieved


def _span(run: list[int]) -> str:
    return f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}"


def chunk_range(offset: int, size: int, data_size: int) -> range:
    """The chunks that ``size`` bytes from ``offset`` touch in a blob of ``data_size`` bytes."""
    end = min(offset + size, data_size)
    return range(offset // CHUNK, (end + CHUNK - 1) // CHUNK) if end > offset else range(0)
