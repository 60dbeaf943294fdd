"""What can go wrong with EROFS images and with what they are made of.

    ErofsError
    ├── SourceError     a tar, a directory or a tree of entries that cannot become an image; ``.path`` says where
    └── FormatError     bytes that are not an EROFS image, or not one that is understood here
        └── VerifyError     an image that must not be mounted

Each message is one line: what, where, what was found, what was expected.
"""

from __future__ import annotations

SHOWN_MAX = 200
"""Characters of one value in a message: what comes from elsewhere can have megabytes."""


def escape(text: str) -> str:
    """The text as one line without control characters: those are written as in Python's literals."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, limit: int = SHOWN_MAX) -> str:
    """The text, or its beginning and its end when it has more than ``limit`` characters."""
    return text if len(text) <= limit else f"{text[: limit // 2]}[...]{text[-limit // 2 :]}"


def show(value: object) -> str:
    """A value that somebody else wrote, as repr, for a message."""
    try:
        return shorten(repr(value))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def whole_path(path: bytes) -> str:
    """A path of raw bytes as text: one line, UTF-8 where it is that, ``\\xNN`` where not; the root is ``/``."""
    return escape(path.decode("utf-8", "backslashreplace") or "/")


def show_path(path: bytes) -> str:
    """The same for a message: a long one is cut in its middle."""
    return shorten(whole_path(path))


class ErofsError(Exception):
    """Root of the package's errors; ``str()`` is one line for a person."""


class SourceError(ErofsError):
    """Input that cannot become an image. ``path`` is the raw path inside the source (b"" for the source as a whole)."""

    def __init__(self, message: str, path: bytes = b"") -> None:
        super().__init__(f"{show_path(path)}: {message}" if path else message)
        self.path = path


class FormatError(ErofsError):
    """Bytes that are not what the format asks for."""


class VerifyError(FormatError):
    """An image that was checked before use and refused."""
