"""Real registries for tests: ours in a thread, ours as a process, and Debian's docker-registry."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec_store.backends.base import Backend
from dsec_store.registry.serve import Server, address_of, listen
from tests.conftest import DSEC
from tests.waiting import until


@contextmanager
def registry_thread(backend: Backend) -> Iterator[str]:
    """Our registry over a backend, in a thread of this process; gives ``host:port``."""
    ready = threading.Event()
    with listen("127.0.0.1:0") as sock:
        host = address_of(sock)
        server = Server(backend, ready.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), name="registry")
        thread.start()
        try:
            assert ready.wait(10), "the registry did not start"
            yield host
        finally:
            server.stop()
            thread.join(10)
            assert not thread.is_alive()


@dataclass
class RegistryProcess:
    """``dsec registry serve`` as it was started; ``host`` is what it printed. Its stderr is a pipe: it says little."""

    process: subprocess.Popen[str]
    host: str


@contextmanager
def registry_process(home: Path, address: str = "127.0.0.1:0") -> Iterator[RegistryProcess]:
    """Our registry as a process over the store of ``home``; ended by SIGTERM if the test has not ended it."""
    environment = {**os.environ, "DSEC_HOME": str(home)}
    with subprocess.Popen(
        [DSEC, "registry", "serve", "--listen", address],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], 20)[0], "the registry did not start within 20 s"
            line = process.stdout.readline()
            assert line.startswith("listening on "), line
            yield RegistryProcess(process, line.split()[-1])
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def docker_registry(folder: Path) -> Iterator[str]:
    """Debian's docker-registry 2.8 with its objects below ``folder``; gives ``host:port``."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    folder.mkdir(parents=True)
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder / 'data'}}}}}\n"
        f"http: {{addr: {host}}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["/usr/bin/docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        until(lambda: _answers(host) or process.poll() is not None, "docker-registry to answer")
        assert process.poll() is None, (folder / "log").read_text()
        yield host
    finally:
        process.terminate()
        process.wait(10)


def _answers(host: str) -> bool:
    address, port = host.split(":")
    try:
        socket.create_connection((address, int(port)), timeout=1).close()
    except OSError:
        return False
    return True
