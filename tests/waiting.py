"""Waiting for what has no event of its own, with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float = 10.0) -> T:
    """Return the first true value of ``condition``; fail with ``what`` when there is none within ``seconds``.

    For things that the kernel or another process does on its own and tells nobody (releasing a superblock after the
    last reference, say). Where a descriptor, a socket or an exit can be waited for, wait for that.
    """
    deadline = time.monotonic() + seconds
    pause = 0.001
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain: {what}")
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
