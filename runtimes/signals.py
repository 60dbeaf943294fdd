"""Signals to ``dsec run``: an exception while a sandbox is set up, an event while its command runs."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal came while the sandbox was set up."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Signals:
    """Catches the stopping signals (but those that the caller ignores, as nohup does) and changes of the window's
    size.

    ``descriptor`` is readable after a signal. While ``interrupting``, a stopping one raises Stopped in the main
    thread; else it is in ``received``. Outside of the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.interrupting = True
        self.received: list[int] = []
        self.resized = False
        self.descriptor, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: dict[int, object] = {}
        try:
            self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        except ValueError:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a caller's SIG_IGN outlives exec: nobody could be waited for
        for number in (*STOPPING, signal.SIGWINCH):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGWINCH:
            self.resized = True
            return
        self.received.append(number)
        if self.interrupting:
            self.interrupting = False  # once: what follows is the clean-up
            raise Stopped(number)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Do not interrupt what is inside; Stopped is raised after it."""
        self.hold()
        yield
        self.interrupting = True
        if self.received:
            self.hold()

    def hold(self) -> None:
        """From now on signals do not interrupt. Raises Stopped for one that came before."""
        self.interrupting = False
        if self.received:
            raise Stopped(self.received[0])

    def drain(self) -> None:
        """Make ``descriptor`` unreadable again."""
        try:
            while os.read(self.descriptor, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Put back what was there before."""
        self.interrupting = False
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        os.close(self.descriptor)
        os.close(self._write)
