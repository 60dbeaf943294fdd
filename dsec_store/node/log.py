"""The node's log: one line an event, ``time level event key=value …`` (logfmt), to stderr.

The standard library's logging, because a node is started when the first sandbox waits for it: importing structlog takes
a third of that start (it loads rich).
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any


class Log:
    """``log.warning("what happened", layer=…, reason=…)``; values are quoted where they need it."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def info(self, event: str, **values: Any) -> None:
        self._write(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        self._write(logging.WARNING, event, values)

    def error(self, event: str, **values: Any) -> None:
        self._write(logging.ERROR, event, values)

    def exception(self, event: str, **values: Any) -> None:
        """An error with the traceback of what is being handled: for faults of ours."""
        self._write(logging.ERROR, event, values, exc_info=True)

    def _write(self, level: int, event: str, values: dict[str, Any], exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            pairs = "".join(f" {key}={_quoted(value)}" for key, value in values.items())
            self._logger.log(level, "%s%s", event, pairs, exc_info=exc_info)


def _quoted(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if plain else '"' + repr(text)[1:-1].replace('"', '\\"') + '"'


def to_stderr() -> None:
    """Write everything from INFO on to stderr, in UTC."""
    formatter = logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("dsec").setLevel(logging.INFO)
