"""A far link: a TCP proxy with a limited rate and a latency, to stand between a client and any server.

    with FarLink("127.0.0.1:5000", mb_per_s=50, ms=5) as link:
        ... speak to link.host ...
        print(link.stats())

The kernel here has no netem, so the link is a process of its own: it must not share the interpreter lock with what is
measured. What it models, per direction: one line of ``mb_per_s`` (10^6 bytes a second) shared by all connections in the
order in which bytes arrive, then ``ms`` of flight. A new connection's first bytes wait one round trip more, as behind a
TCP handshake. Not modelled: slow start, loss, a shared medium.

``python -m bench.farlink --target 127.0.0.1:5000 --mbps 50 --ms 5`` prints ``listening on HOST:PORT``
and ends with its standard input. Lines on standard input are commands: ``stats``, ``cut``, ``set MB_PER_S MS``; each is
answered by one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_SLACK = 0.008
"""Seconds by which a connection may run ahead of the line: hides the timers' jitter, so that the line stays busy."""

_SOCKET_BUFFER = 512 * 1024


class Line:
    """One direction: ``reserve`` says when bytes that arrive now have passed the line."""

    def __init__(self, mb_per_s: float, ms: float) -> None:
        self.free_at = 0.0
        self.bytes = 0
        self.set(mb_per_s, ms)

    def set(self, mb_per_s: float, ms: float) -> None:
        self.rate = mb_per_s * 1e6
        self.latency = ms / 1e3

    def reserve(self, size: int, now: float) -> float:
        """Take the line for ``size`` bytes; the loop time at which the last of them has left."""
        self.free_at = max(self.free_at, now) + (size / self.rate if self.rate else 0.0)
        return self.free_at

    @property
    def read_size(self) -> int:
        """Bytes of one read: two milliseconds of the line, so that connections take turns."""
        return min(256 * 1024, max(4096, int(self.rate * 0.002))) if self.rate else 256 * 1024


class Side(asyncio.BufferedProtocol):
    """One end of a proxied connection: reads, books the line, writes to the other end when the bytes have arrived."""

    def __init__(self, link: Proxy, line: Line) -> None:
        self.link = link
        self.loop = link.loop
        self.line = line
        self.other: Side | None = None
        self.transport: asyncio.Transport | None = None
        self.earliest = 0.0  # no byte leaves before: the end of the handshake, then the byte before it
        self.buffer = bytearray(line.read_size)
        self.flying: deque[tuple[float, bytes | None]] = deque()  # (arrival, bytes; None is the end of the stream)
        self.timer: asyncio.TimerHandle | None = None
        self.resume: asyncio.TimerHandle | None = None
        self.blocked = False  # the other end's buffer is full
        self.ended = False  # our peer has sent its last byte, and it was passed on
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # reading

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = self.loop.time()
        left = self.line.reserve(nbytes, now)
        self._fly(left, bytes(memoryview(self.buffer)[:nbytes]))
        if left - now > _SLACK or self.blocked:
            self._pause(None if self.blocked else left - _SLACK)

    def eof_received(self) -> bool:
        self._fly(self.loop.time(), None)
        return True  # the other direction goes on

    def _pause(self, until: float | None) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.pause_reading()
        if self.resume is not None:
            self.resume.cancel()
        self.resume = self.loop.call_at(until, self._resume) if until is not None else None

    def _resume(self) -> None:
        self.resume = None
        if self.transport is not None and not self.transport.is_closing() and not self.blocked:
            self.transport.resume_reading()

    # flying and landing

    def _fly(self, left: float, data: bytes | None) -> None:
        self.earliest = max(left, self.earliest)
        arrival = self.earliest + self.line.latency
        self.flying.append((arrival, data))
        if self.timer is None and not self.blocked:
            self.timer = self.loop.call_at(arrival, self._land)

    def _land(self) -> None:
        self.timer = None
        other = self.other
        if other is None or other.transport is None:
            return
        now = self.loop.time() + 0.0002  # one more timer is not worth a fifth of a millisecond
        landed = []
        while self.flying and not self.ended and self.flying[0][0] <= now:
            data = self.flying.popleft()[1]
            if data is None:
                self.ended = True
            else:
                landed.append(data)
                self.line.bytes += len(data)
        if other.transport.is_closing():
            self._stop()
            return
        if landed:
            other.transport.writelines(landed)
        if self.ended:
            if other.ended or other.lost:
                other.transport.close()
                if self.transport is not None:
                    self.transport.close()
            elif other.transport.can_write_eof():
                other.transport.write_eof()
        elif self.flying and not self.blocked:
            self.timer = self.loop.call_at(self.flying[0][0], self._land)

    def pause_writing(self) -> None:
        """Our peer does not read: the other end has to stop."""
        if self.other is not None:
            self.other.blocked = True
            self.other._pause(None)

    def resume_writing(self) -> None:
        other = self.other
        if other is not None and other.blocked:
            other.blocked = False
            if other.timer is None and other.flying:
                other.timer = self.loop.call_at(other.flying[0][0], other._land)
            other._resume()

    # the end

    def connection_lost(self, exc: Exception | None) -> None:
        """Both directions are gone: the other end is told after the flight, by a reset when ours was one."""
        self.lost = True
        self.link.connections.discard(self)
        if self.other is None or self.other.lost:
            self._stop()
            return
        other = self.other
        if exc is not None:
            self.loop.call_at(self.loop.time() + self.line.latency, other.abort)
        elif not self.ended and not any(data is None for _, data in self.flying):
            self._fly(self.loop.time(), None)

    def _stop(self) -> None:
        for handle in (self.timer, self.resume):
            if handle is not None:
                handle.cancel()
        self.timer = self.resume = None
        self.flying.clear()

    def abort(self) -> None:
        """End this end at once, with a reset."""
        self._stop()
        if self.transport is not None and not self.lost:
            sock = self.transport.get_extra_info("socket")
            if sock is not None and sock.fileno() >= 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            self.transport.abort()


class Proxy:
    """The link's process: accepts, connects, and answers commands."""

    def __init__(self, target: tuple[str, int], mb_per_s: float, ms: float) -> None:
        self.loop = asyncio.get_running_loop()
        self.target = target
        self.up = Line(mb_per_s, ms)  # towards the server
        self.down = Line(mb_per_s, ms)  # towards the client
        self.connections: set[Side] = set()
        self.accepted = 0
        self.refused = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> str:
        listener = socket.create_server((host, port), backlog=256)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)  # inherited by what it accepts
        listener.setblocking(False)
        task = self.loop.create_task(self._accept(listener))
        self._tasks.add(task)
        bound = listener.getsockname()
        return f"{bound[0]}:{bound[1]}"

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await self.loop.sock_accept(listener)
            self.accepted += 1
            task = self.loop.create_task(self._connect(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect(self, sock: socket.socket) -> None:
        handshake = self.loop.time() + 2 * self.up.latency
        try:
            upstream = socket.socket(socket.AF_INET6 if ":" in self.target[0] else socket.AF_INET)
            upstream.setblocking(False)
            upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
            await self.loop.sock_connect(upstream, self.target)
        except OSError:  # the server is gone: so is the client's connection
            upstream.close()
            self.refused += 1
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            sock.close()
            return
        client, server = Side(self, self.up), Side(self, self.down)
        client.other, server.other = server, client
        client.earliest = server.earliest = handshake
        self.connections |= {client, server}
        await self.loop.create_connection(lambda: server, sock=upstream)
        sock.setblocking(False)
        await self.loop.connect_accepted_socket(lambda: client, sock)

    def command(self, line: str) -> dict[str, object]:
        words = line.split()
        if words[:1] == ["set"] and len(words) == 3:
            for one in (self.up, self.down):
                one.set(float(words[1]), float(words[2]))
        elif words == ["cut"]:
            for side in list(self.connections):
                side.abort()
        elif words != ["stats"]:
            return {"error": f"unknown command {line!r}"}
        return {
            "bytes_up": self.up.bytes,
            "bytes_down": self.down.bytes,
            "connections": self.accepted,
            "open": len(self.connections) // 2,
            "refused": self.refused,
        }


async def _serve(args: argparse.Namespace) -> None:
    proxy = Proxy(_parse_target(args.target), args.mbps, args.ms)
    print(f"listening on {await proxy.listen(args.host, args.port)}", flush=True)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        print(json.dumps(proxy.command(line.decode())), flush=True)


def _parse_target(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]") or "127.0.0.1", int(port)


@dataclass(frozen=True)
class LinkStats:
    """Bytes that landed, by direction (``down`` is towards the client), and connections: accepted, open, refused."""

    bytes_up: int
    bytes_down: int
    connections: int
    open: int
    refused: int


class FarLink:
    """Context manager around the link's process; ``host`` is ``127.0.0.1:PORT``, to be used in the target's place.

    ``mb_per_s`` in 10^6 bytes per second and direction (0: no limit), ``ms`` one way.
    """

    def __init__(self, target: str, mb_per_s: float = 50.0, ms: float = 5.0) -> None:
        self.target = target
        self.mb_per_s = mb_per_s
        self.ms = ms
        self.host = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> FarLink:
        # Isolated and without site-packages: the link needs the standard library alone, and starts in 100 ms.
        command = [sys.executable, "-IS", str(Path(__file__).resolve()), "--target", self.target]
        command += ["--mbps", str(self.mb_per_s), "--ms", str(self.ms)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("listening on "):
            self.__exit__(None, None, None)
            raise RuntimeError(f"the far link to {self.target} did not start: {line!r}")
        self.host = line.split()[-1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    @property
    def base(self) -> str:
        return f"http://{self.host}"

    def _ask(self, command: str) -> LinkStats:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return LinkStats(**json.loads(self._process.stdout.readline()))

    def stats(self) -> LinkStats:
        return self._ask("stats")

    def cut(self) -> LinkStats:
        """Reset every open connection, on both sides."""
        return self._ask("cut")

    def set(self, mb_per_s: float, ms: float) -> LinkStats:
        """Change rate and latency for what is read from now on."""
        self.mb_per_s, self.ms = mb_per_s, ms
        return self._ask(f"set {mb_per_s} {ms}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.farlink", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--target", required=True, help="HOST:PORT of the server")
    parser.add_argument("--mbps", type=float, default=50.0, help="megabytes (10^6) a second, each way; 0: no limit")
    parser.add_argument("--ms", type=float, default=5.0, help="latency, one way")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    try:
        asyncio.run(_serve(parser.parse_args()))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
