"""``dsec run -t`` in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Iterator

import pytest

from tests.conftest import DSEC
from tests.runtimes.conftest import BASE, Box


class Terminal:
    """``dsec run`` as the leader of a session on a pseudo terminal of 33 rows and 77 columns."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
                for fd in range(3):
                    os.dup2(slave, fd)
                os.closerange(3, 1000)
                os.execv(DSEC, [str(DSEC), "run", BASE, *arguments])
            finally:
                os._exit(99)
        self.text = b""

    def read_until(self, wanted: bytes, seconds: float = 30) -> bytes:
        deadline = time.monotonic() + seconds
        while wanted not in self.text:
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{wanted!r} did not come; got {self.text!r}"
            self.text += os.read(self.master, 4096)
        before, _, self.text = self.text.partition(wanted)
        return before + wanted

    def send(self, data: bytes) -> None:
        os.write(self.master, data)

    def insist(self, data: bytes, wanted: bytes) -> None:
        """Send until ``wanted`` comes: a shell misses a signal while it is about to start a program."""
        for _ in range(100):
            self.send(data)
            if select.select([self.master], [], [], 0.3)[0]:
                self.text += os.read(self.master, 4096)
            if wanted in self.text:
                break
        self.read_until(wanted)

    def wait(self) -> int:
        """Its exit code; what it still wrote is in ``text``."""
        pidfd = os.pidfd_open(self.pid)
        try:
            while True:
                ready, _, _ = select.select([self.master, pidfd], [], [], 30)
                assert ready, "dsec run did not end"
                if self.master in ready:
                    self.text += os.read(self.master, 4096)
                else:
                    break
        finally:
            os.close(pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.slave)
        os.close(self.master)


@pytest.fixture
def terminal(box: Box) -> Iterator[type[Terminal]]:
    opened: list[Terminal] = []

    class Opened(Terminal):
        def __init__(self, *arguments: str) -> None:
            super().__init__(*arguments)
            opened.append(self)

    yield Opened
    for each in opened:
        each.close()


def test_a_shell_in_a_terminal_has_size_colours_and_control_c(terminal: type[Terminal]) -> None:
    shell = terminal("-i", "-t", "--", "sh")
    shell.read_until(b"# ")
    shell.send(b"stty size; echo $TERM; tty\r")
    text = shell.read_until(b"/dev/pts/0")
    assert b"33 77" in text and b"xterm" in text
    shell.read_until(b"# ")
    raw = termios.tcgetattr(shell.slave)
    assert not raw[3] & termios.ICANON and not raw[3] & termios.ECHO
    shell.send(b"echo sta''rted; /bin/busybox sleep 1000\r")
    shell.read_until(b"started")
    shell.insist(b"\x03", b"# ")  # to the command, not to us
    fcntl.ioctl(shell.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 88, 0, 0))
    os.kill(shell.pid, signal.SIGWINCH)
    shell.send(b"while [ \"$(stty size)\" != '44 88' ]; do sleep 0.05; done; echo resi''zed\r")
    shell.read_until(b"resized")
    shell.send(b"exit 7\r")
    assert shell.wait() == 7
    assert termios.tcgetattr(shell.slave) == shell.before


def test_the_terminal_is_restored_after_a_timeout(terminal: type[Terminal]) -> None:
    shell = terminal("-i", "-t", "--timeout", "1", "--", "sh")
    shell.read_until(b"# ")
    assert shell.wait() == 124
    assert termios.tcgetattr(shell.slave) == shell.before


def test_without_i_control_c_stops_the_run(terminal: type[Terminal]) -> None:
    shell = terminal("-t", "--", "sh", "-c", "echo ready; sleep 1000")
    shell.read_until(b"ready")
    shell.send(b"\x03")
    assert shell.wait() == 130
    assert termios.tcgetattr(shell.slave) == shell.before


def test_without_t_the_command_has_no_terminal_and_no_stdin(terminal: type[Terminal]) -> None:
    shell = terminal("--", "sh", "-c", "tty; cat; echo end")
    text = shell.read_until(b"end")
    assert b"not a tty" in text
    assert shell.wait() == 0


def test_with_i_the_terminal_is_passed_on_line_by_line(terminal: type[Terminal]) -> None:
    shell = terminal("-i", "--", "sh", "-c", "read x; echo got $x; cat; echo end")
    shell.send(b"hello\r")
    shell.read_until(b"got hello")
    shell.send(b"\x04")
    shell.read_until(b"end")
    assert shell.wait() == 0


def test_a_program_that_cannot_start_in_a_terminal_is_one_line(terminal: type[Terminal]) -> None:
    shell = terminal("-i", "-t", "--", "garbage")
    assert shell.wait() == 126
    assert shell.text.count(b"\n") == 1 and shell.text.startswith(b"dsec: cannot start 'garbage'")


def test_piped_input_reaches_a_terminal_and_ends_there(box: Box) -> None:
    done, record = box.run("-t", "--", "sh", "-c", "tty; cat; echo end >&2", input=b"line\n")
    assert done.returncode == 0
    assert "/dev/pts/0" in done.stdout and "line" in done.stdout and "end" in done.stdout
    assert record["stderr"]["total"] == 0
