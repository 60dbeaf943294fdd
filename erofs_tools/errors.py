"""What can go wrong with EROFS images and with what they are made of.

    ErofsError
    ├── SourceError     a tar, a directory or a tree of entries that cannot become an image; ``.path`` says where
    └── FormatError     bytes that are not an EROFS image, or not one that is understood here
        └── VerifyError     an image that must not be mounted

Each message is one line: what, where, what was found, what was expected.
"""

from __future__ import annotations


def show_path(path: bytes) -> str:
    """A path of raw bytes for a message: one line, UTF-8 where it is that, ``\\xNN`` where not; the root is ``/``."""
    text = path.decode("utf-8", "backslashreplace") or "/"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


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
