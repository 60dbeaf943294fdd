"""The far link, on which every figure of the benchmarks rests: its rate, its latency, how connections end on it."""

from __future__ import annotations

import functools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec

import pytest

from bench.farlink import FarLink

Handler = Callable[[socket.socket], None]


P = ParamSpec("P")


def measured(test: Callable[P, None]) -> Callable[P, None]:
    """A measurement: others use this machine too, and it holds when it comes out right once in five."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(4):
            try:
                test(*args, **kwargs)
                return
            except AssertionError:
                pass
        test(*args, **kwargs)

    return run


@contextmanager
def tcp_server(handler: Handler) -> Iterator[str]:
    """A server with one thread per connection; gives ``host:port``."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with sock:
            try:
                handler(sock)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(sock,)))
            threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join()
        for thread in threads:
            thread.join()


def connect(host: str) -> socket.socket:
    name, port = host.rsplit(":", 1)
    sock = socket.create_connection((name, int(port)), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def echo(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := sock.recv(65536):
        sock.sendall(data)


def source(size: int) -> Handler:
    """Waits for a byte, then sends ``size`` bytes and ends."""

    def handler(sock: socket.socket) -> None:
        if sock.recv(1):
            block = bytes(1 << 20)
            left = size
            while left:
                left -= sock.send(block[: min(left, len(block))])

    return handler


def receive_all(sock: socket.socket) -> int:
    total = 0
    while data := sock.recv(1 << 18):
        total += len(data)
    return total


def round_trip(sock: socket.socket) -> float:
    began = time.perf_counter()
    sock.sendall(b"x")
    assert sock.recv(1) == b"x"
    return time.perf_counter() - began


@pytest.mark.parametrize("mb_per_s", [20, 50])
def test_one_connection_gets_the_rate(mb_per_s: float) -> None:
    size, tries, rates = int(mb_per_s * 1e6), 3, []
    with tcp_server(source(size)) as target, FarLink(target, mb_per_s, 5) as link:
        for _ in range(tries):  # a busy machine may slow down the reader, nothing may speed it up
            with connect(link.host) as sock:
                began = time.perf_counter()
                sock.sendall(b"x")
                assert receive_all(sock) == size
                rates.append(size / (time.perf_counter() - began) / 1e6)
            if rates[-1] > 0.85 * mb_per_s:
                break
        assert max(rates) == pytest.approx(mb_per_s, rel=0.15)
        assert link.stats().bytes_down == len(rates) * size


@measured
def test_sixteen_connections_share_the_rate_fairly() -> None:
    size, count, mb_per_s = 2_000_000, 16, 40.0
    ends: list[float] = []
    with tcp_server(source(size)) as target, FarLink(target, mb_per_s, 5) as link:

        def read() -> None:
            with connect(link.host) as sock:
                sock.sendall(b"x")
                assert receive_all(sock) == size
                ends.append(time.perf_counter() - began)

        began = time.perf_counter()
        threads = [threading.Thread(target=read) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ends) == count
        assert count * size / max(ends) == pytest.approx(mb_per_s * 1e6, rel=0.15)
        assert min(ends) > 0.6 * max(ends), f"not shared: {sorted(ends)}"
        assert link.stats().connections == count


@measured
def test_directions_do_not_share_the_rate() -> None:
    size, mb_per_s = 10_000_000, 20.0

    def exchange(sock: socket.socket) -> None:
        sender = threading.Thread(target=lambda: sock.sendall(bytes(size)))
        sender.start()
        left = size
        while left and (data := sock.recv(min(left, 1 << 18))):
            left -= len(data)
        sender.join()

    with tcp_server(exchange) as target, FarLink(target, mb_per_s, 5) as link, connect(link.host) as sock:
        began = time.perf_counter()
        exchange(sock)
        seconds = time.perf_counter() - began
        assert 0.85 * size / (mb_per_s * 1e6) < seconds < 1.6 * size / (mb_per_s * 1e6), "one line would take twice"


@pytest.mark.parametrize("ms", [0, 5, 20])
@measured
def test_a_round_trip_takes_twice_the_latency(ms: float) -> None:
    with tcp_server(echo) as target, FarLink(target, 50, ms) as link, connect(link.host) as sock:
        round_trip(sock)
        times = sorted(round_trip(sock) for _ in range(31))
        assert times[0] >= 2 * ms / 1000 - 0.0005
        assert times[8] == pytest.approx(2 * ms / 1000, abs=0.003)  # the quartile: others use this machine too


@measured
def test_a_new_connection_costs_a_round_trip_more() -> None:
    with tcp_server(echo) as target, FarLink(target, 50, 20) as link, connect(link.host) as sock:
        assert round_trip(sock) == pytest.approx(0.080, abs=0.01)
        assert round_trip(sock) == pytest.approx(0.040, abs=0.01)


@measured
def test_new_connections_do_not_slow_down_the_others() -> None:
    with tcp_server(echo) as target, FarLink(target, 50, 20) as link, connect(link.host) as sock:
        round_trip(sock)
        with connect(link.host) as newcomer:
            newcomer.sendall(b"y")
            assert round_trip(sock) == pytest.approx(0.040, abs=0.01)


@measured
def test_latency_does_not_limit_the_rate() -> None:
    size = 20_000_000
    with tcp_server(source(size)) as target, FarLink(target, 50, 100) as link, connect(link.host) as sock:
        began = time.perf_counter()
        sock.sendall(b"x")
        assert receive_all(sock) == size
        assert time.perf_counter() - began == pytest.approx(0.4 + size / 50e6, rel=0.15)


def test_bytes_arrive_as_they_were_sent() -> None:
    data = os.urandom(3_000_000)
    with tcp_server(echo) as target, FarLink(target, 100, 1) as link, connect(link.host) as sock:

        def send() -> None:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        got = bytearray()
        while block := sock.recv(1 << 18):
            got += block
        sender.join()
        assert got == data
        stats = link.stats()
        assert (stats.bytes_up, stats.bytes_down) == (len(data), len(data))


def test_a_hang_up_of_the_server_passes_on_after_the_last_byte() -> None:
    with tcp_server(source(100_000)) as target, FarLink(target, 50, 5) as link, connect(link.host) as sock:
        sock.sendall(b"x")
        assert receive_all(sock) == 100_000


def test_a_reset_of_the_server_passes_on_as_a_reset() -> None:
    def handler(sock: socket.socket) -> None:
        sock.recv(1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with tcp_server(handler) as target, FarLink(target, 50, 5) as link, connect(link.host) as sock:
        sock.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            receive_all(sock)


def test_a_client_that_goes_away_is_seen_by_the_server() -> None:
    gone = threading.Event()

    def handler(sock: socket.socket) -> None:
        try:
            while True:
                sock.sendall(bytes(1 << 16))
        except OSError:
            gone.set()

    with tcp_server(handler) as target, FarLink(target, 50, 5) as link:
        with connect(link.host) as sock:
            assert sock.recv(1)
        assert gone.wait(10)


def test_a_client_that_does_not_read_stops_the_server_and_nobody_else() -> None:
    size = 5_000_000
    with (
        tcp_server(source(size)) as target,
        FarLink(target, 100, 1) as link,
        connect(link.host) as idle,
        connect(link.host) as busy,
    ):
        idle.sendall(b"x")
        busy.sendall(b"x")
        assert receive_all(busy) == size
        assert receive_all(idle) == size


def test_a_dead_target_resets_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        target = f"127.0.0.1:{probe.getsockname()[1]}"
    with FarLink(target, 50, 5) as link:
        with pytest.raises(ConnectionResetError), connect(link.host) as sock:  # the reset may come while it connects
            sock.recv(1)
        assert link.stats().refused == 1


def test_cut_resets_what_is_open_and_new_connections_work() -> None:
    with tcp_server(echo) as target, FarLink(target, 50, 1) as link:
        with connect(link.host) as sock:
            round_trip(sock)
            assert link.stats().open == 1
            link.cut()
            with pytest.raises(ConnectionResetError):
                sock.recv(1)
        with connect(link.host) as sock:
            round_trip(sock)


@measured
def test_the_link_costs_little_cpu() -> None:
    size = 100_000_000
    with tcp_server(source(size)) as target, FarLink(target, 100, 5) as link, connect(link.host) as sock:
        before = cpu_seconds(link.pid)
        sock.sendall(b"x")
        assert receive_all(sock) == size
        assert cpu_seconds(link.pid) - before < 0.5


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
