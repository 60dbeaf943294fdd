"""Progress bars on stderr, for terminals only; rich is imported when one is shown."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def _byte_bar(title: str) -> Iterator[tuple[Progress, TaskID] | None]:
    """A bar that counts bytes, and its one task; None when stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield bar, bar.add_task(title, total=None)


@contextmanager
def build_bar(title: str) -> Iterator[Callable[[str, int], None] | None]:
    """A bar for the events of a build; None when stderr is not a terminal."""
    with _byte_bar(title) as shown:
        if shown is None:
            yield None
            return
        bar, task = shown

        def progress(what: str, amount: int) -> None:
            if what == "total":
                bar.update(task, total=amount)
            elif what == "data":
                bar.advance(task, amount)
            elif what == "publish":  # holes and repeated contents were never written
                bar.update(task, description="syncing to disk", completed=bar.tasks[task].total or 0)

        yield progress


@contextmanager
def transfer_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for bytes done and in total; None when stderr is not a terminal."""
    with _byte_bar(title) as shown:
        if shown is None:
            yield None
            return
        bar, task = shown
        yield lambda done, total: bar.update(task, completed=done, total=total)
