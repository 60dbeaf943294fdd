"""The installed command, called as a person would, for the demo and the benchmarks."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import DSEC

Argument = str | os.PathLike[str]


class Cli:
    """``dsec`` with one home. Failures are a RuntimeError with what it printed."""

    def __init__(self, home: Path) -> None:
        self.home = home.absolute()

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "DSEC_HOME": str(self.home)}

    def run(self, *arguments: Argument, show: bool = False, code: int = 0) -> str:
        """Run it to the end and return what it printed. ``show``: let it print to the terminal, progress bars too."""
        if show:
            print(f"$ dsec {shlex.join(os.fspath(a) for a in arguments)}", flush=True)
        done = subprocess.run(
            [DSEC, *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != code:
            words = " ".join(str(a) for a in arguments)
            raise RuntimeError(f"dsec {words} ended with {done.returncode}: {(done.stderr or '').strip()}")
        return done.stdout or ""

    def json(self, *arguments: Argument) -> Any:
        return json.loads(self.run(*arguments, "--json"))

    def command(self, *arguments: Argument) -> list[str]:
        """The command line; to be run with ``environment``."""
        return [str(DSEC), *(os.fspath(argument) for argument in arguments)]

    def popen(self, *arguments: Argument, stdout: int | None = None) -> subprocess.Popen[bytes]:
        return subprocess.Popen([DSEC, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=stdout)

    def start_node(self) -> None:
        """Have a node run; commands would start one themselves."""
        from dsec_store.home import Home
        from dsec_store.node.client import NodeClient

        NodeClient.connect(Home(self.home).ensure()).status()

    def node_cpu(self) -> float:
        """User and system seconds of the running node so far."""
        fields = Path(f"/proc/{self.json('node', 'status')['pid']}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop_node(self) -> None:
        """End the node if one runs."""
        subprocess.run([DSEC, "node", "stop", "--force"], env=self.environment, capture_output=True, check=False)


def stop_nodes(homes: Path) -> None:
    """End the node of every home directly below ``homes``."""
    for lock in homes.glob("*/run/node.lock"):
        Cli(lock.parent.parent).stop_node()


@contextmanager
def registry(dsec: Cli) -> Iterator[str]:
    """``dsec registry serve`` over that home's store; gives ``127.0.0.1:PORT``."""
    command: list[Argument] = [DSEC, "registry", "serve", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(
        command, env=dsec.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                raise RuntimeError(f"dsec registry serve did not start: {line!r}")
            yield line.split()[-1]
        finally:
            process.terminate()
