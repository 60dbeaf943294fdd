"""What one would do without dsec, over the same link: download one tar.zst, unpack it, run the same command with crun.

Nothing is slowed down on purpose: one stream, unpacked while it arrives, from a plain HTTP file server; the same OCI
runtime, specification and command.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNPACK = ("tar", "-x", "--numeric-owner", "--same-permissions", "--xattrs", "--xattrs-include=*", "-I", "zstd")


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """Serve a folder by HTTP from a process of its own; gives ``127.0.0.1:PORT``."""
    serve = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), "0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()  # Serving HTTP on 127.0.0.1 port N (http://…) ...
            yield f"127.0.0.1:{line.split(' port ')[1].split()[0]}"
        finally:
            server.terminate()


def download_and_unpack(host: str, name: str, target: Path) -> int:
    """Stream ``http://host/name`` into tar; returns the bytes of the archive. Raises RuntimeError."""
    target.mkdir(parents=True)
    host_name, _, port = host.partition(":")
    connection = http.client.HTTPConnection(host_name, int(port), timeout=60)
    try:
        connection.request("GET", f"/{name}")
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"http://{host}/{name} answered {response.status}")
        received = 0
        with subprocess.Popen([*UNPACK, "-C", str(target)], stdin=subprocess.PIPE) as tar:
            assert tar.stdin is not None
            while block := response.read(1 << 18):
                received += len(block)
                tar.stdin.write(block)
        if tar.returncode or received != int(response.headers["Content-Length"]):
            raise RuntimeError(f"unpacking http://{host}/{name} failed ({tar.returncode}, {received} bytes)")
        return received
    finally:
        connection.close()
