"""References: ``name:tag``, ``name@sha256:…``, ``host:port/name:tag`` (OCI grammar; standard library only).

What is a host follows docker's rule: the part before the first slash is one when it has a dot or a colon, or is
``localhost``.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from dsec_store.digests import is_digest
from dsec_store.errors import ReferenceInvalid
from erofs_tools.errors import show

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:({_LABEL}(?:\.{_LABEL})*)|\[([0-9A-Fa-f:.]+)\])(?::([0-9]{{1,5}}))?")
_FOUR_NUMBERS = re.compile(r"[0-9]+(?:\.[0-9]+){3}")
_HOST_MAX = 253
"""Characters of a name in the DNS (RFC 1035 §2.3.4); one of its labels has 1 to 63."""


@dataclass(frozen=True)
class Reference:
    """A parsed reference. Without ``host`` it names the local store. Exactly one of ``tag`` and ``digest`` is set,
    or the digest wins."""

    name: str
    tag: str | None = None
    digest: str | None = None
    host: str | None = None

    def __str__(self) -> str:
        text = f"{self.host}/{self.name}" if self.host else self.name
        return f"{text}@{self.digest}" if self.digest else f"{text}:{self.tag}"

    @property
    def version(self) -> str:
        """What the distribution API calls *reference*: the digest, or the tag."""
        return self.digest or self.tag or "latest"

    def local(self) -> Reference:
        """The same name without the host."""
        return replace(self, host=None)


def is_loopback(host: str) -> bool:
    """Whether ``host[:port]`` is this machine by its name or address: such registries are spoken to in plain HTTP."""
    bare = host.rsplit(":", 1)[0] if not host.endswith("]") and ":" in host else host
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare.strip("[]")).is_loopback
    except ValueError:
        return False


def valid_name(name: str) -> bool:
    return len(name) <= 255 and _NAME.fullmatch(name) is not None


def valid_tag(tag: str) -> bool:
    return _TAG.fullmatch(tag) is not None


def _wrong_host(text: str) -> str:
    """What is wrong with ``host[:port]``; empty when nothing is."""
    found = _HOST.fullmatch(text)
    if found is None:
        return f"{show(text)} is not a host (labels of 1 to 63 letters, digits and -, joined by dots)"
    name, address, port = found.groups()
    if name is not None and len(name) > _HOST_MAX:
        return f"{show(name)} is not a host: {len(name)} characters, at most {_HOST_MAX}"
    if address is not None or _FOUR_NUMBERS.fullmatch(name):
        try:
            (ipaddress.IPv4Address if address is None else ipaddress.IPv6Address)(address or name)
        except ValueError:
            return f"{show(address or name)} is not an address"
    if port is not None and not 0 < int(port) < 65536:
        return f"{port} is not a port"
    return ""


def parse_reference(text: str, *, default_tag: str = "latest") -> Reference:
    """Parse a reference; raises ReferenceInvalid with the part that is wrong."""

    def bad(why: str) -> ReferenceInvalid:
        return ReferenceInvalid(f"not a reference: {show(text)}: {why}; expected [HOST[:PORT]/]NAME[:TAG|@sha256:…]")

    rest, host, digest, tag = text, None, None, None
    if "@" in rest:
        rest, digest = rest.split("@", 1)
        if not is_digest(digest):
            raise bad(f"{show(digest)} is not sha256: and 64 hexadecimal digits")
    first, slash, tail = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        why = _wrong_host(first)
        if why:
            raise bad(why)
        host, rest = first, tail
    if ":" in rest:
        rest, tag = rest.rsplit(":", 1)
        if not valid_tag(tag):
            raise bad(f"{show(tag)} is not a tag")
    if not valid_name(rest):
        raise bad(f"{show(rest)} is not a name (lower-case components of letters and digits, joined by . _ - and /)")
    if digest is None and tag is None:
        tag = default_tag
    return Reference(rest, None if digest else tag, digest, host)
