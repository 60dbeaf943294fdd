"""A client of the OCI Distribution API (synchronous, httpx): what push and pull need of it.

Nothing that it returns is unverified: manifests are hashed, blobs are hashed while they stream (the last piece is only
given out when the digest is right), and ranges must be exactly what was asked for. Every failure is one line that names
the registry, the object and what was found.
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from dsec_store.digests import digest_of, is_digest
from dsec_store.errors import BlobUnknown, IntegrityError, ReferenceUnknown, RegistryError, RegistryUnreachable
from dsec_store.manifest import MANIFEST_MAX
from dsec_store.refs import is_loopback
from dsec_store.registry.oci import MANIFEST_TYPES
from dsec_store.registry.ranges import parse_content_range
from erofs_tools.errors import shorten, show

CONNECT_TIMEOUT = 10.0
SILENCE_TIMEOUT = 30.0
"""Seconds without a byte in either direction."""
COMMIT_TIMEOUT = 300.0
"""Seconds that a registry may take to sync a blob after its last byte."""
BLOCK = 1 << 20


class RegistryClient:
    """One registry, ``host[:port]``. Plain HTTP on loopback, else HTTPS unless ``plain_http`` says otherwise.

    A context manager; safe for one thread at a time.
    """

    def __init__(self, host: str, *, plain_http: bool | None = None) -> None:
        loopback = is_loopback(host)
        if plain_http is None:
            plain_http = loopback
        self.host = host
        self._timeout = httpx.Timeout(SILENCE_TIMEOUT, connect=CONNECT_TIMEOUT)
        with self._translated("its address", 0, None):
            self._http = httpx.Client(
                base_url=f"{'http' if plain_http else 'https'}://{host}/v2/",
                timeout=self._timeout,
                follow_redirects=True,  # registries send readers of blobs to their object store
                trust_env=not loopback,  # a proxy would look for the registry on its own loopback
                headers={"User-Agent": "dsec", "Accept-Encoding": "identity"},
            )

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Manifests

    def get_manifest(self, name: str, reference: str) -> tuple[bytes, str, str]:
        """(bytes, media type, digest) of a manifest by tag or digest.

        Raises ReferenceUnknown, IntegrityError (the digest is another one), RegistryError.
        """
        what = f"the manifest {_join(name, reference)}"
        with self._request("GET", f"{name}/manifests/{reference}", what, accept=MANIFEST_TYPES) as response:
            if response.status_code == 404:
                raise ReferenceUnknown(f"registry {self.host} has no {_join(name, reference)}{_said(response)}")
            self._expect(response, (200,), what)
            data = bytearray()
            for piece in self._body(response, what):
                data += piece
                if len(data) > MANIFEST_MAX:
                    raise IntegrityError(f"{what} from {self.host} has more than {MANIFEST_MAX} bytes")
            self._check_length(response, len(data), what)
            digest, promised = digest_of(bytes(data)), response.headers.get("docker-content-digest", "")
            expected = reference if is_digest(reference) else promised
            if expected and digest != expected:
                raise IntegrityError(f"{what} from {self.host}: found {digest}, expected {shorten(expected)}")
            return bytes(data), response.headers.get("content-type", "").partition(";")[0], digest

    def has_manifest(self, name: str, digest: str) -> bool:
        what = f"the manifest {name}@{digest}"
        with self._request("HEAD", f"{name}/manifests/{digest}", what, accept=MANIFEST_TYPES) as response:
            if response.status_code == 404:
                return False
            self._expect(response, (200,), what)
            return True

    def put_manifest(self, name: str, reference: str, data: bytes, media_type: str) -> str:
        """Store a manifest under a tag or its digest; returns the digest."""
        what = f"the manifest {_join(name, reference)}"
        path = f"{name}/manifests/{reference}"
        with self._request("PUT", path, what, content=data, content_type=media_type) as response:
            self._expect(response, (201, 200), what)
            digest = digest_of(data)
            stored = response.headers.get("docker-content-digest", digest)
            if stored != digest:
                raise IntegrityError(f"{what}: registry {self.host} stored it as {show(stored)}, expected {digest}")
            return digest

    # Blobs

    def blob_size(self, name: str, digest: str) -> int | None:
        """Bytes of a blob, or None when the registry does not have it."""
        what = f"the blob {digest}"
        with self._request("HEAD", f"{name}/blobs/{digest}", what) as response:
            if response.status_code == 404:
                return None
            self._expect(response, (200,), what)
            length = response.headers.get("content-length", "")
            if not length.isdecimal():
                raise RegistryError(f"registry {self.host} gives no Content-Length for {what}", status=200)
            return int(length)

    def stream_blob(self, name: str, digest: str, size: int) -> Iterator[bytes]:
        """The blob's bytes in pieces. ``size`` is what its descriptor says.

        The last piece comes only when size and digest are right: whoever commits what came before the end of the
        iteration commits nothing wrong. Raises BlobUnknown, IntegrityError, RegistryError.
        """
        what = f"the blob {digest}"
        with self._request("GET", f"{name}/blobs/{digest}", what) as response:
            if response.status_code == 404:
                raise BlobUnknown(f"registry {self.host} has no {what[4:]} in {name}{_said(response)}")
            self._expect(response, (200,), what)
            done, summed, last = 0, hashlib.sha256(), b""
            for piece in self._body(response, what, size):
                if last:
                    yield last
                last = piece
                done += len(piece)
                if done > size:
                    raise IntegrityError(f"{what} from {self.host}: found more than {size} bytes")
                summed.update(piece)
            if done != size:
                raise IntegrityError(f"{what} from {self.host}: found {done} bytes, expected {size}")
            if "sha256:" + summed.hexdigest() != digest:
                raise IntegrityError(f"{what} from {self.host}: found sha256:{summed.hexdigest()}, expected {digest}")
            if last:
                yield last

    def read_range(self, name: str, digest: str, offset: int, length: int) -> bytes:
        """``length`` bytes (at least 1) of a blob; not verified, because a part has no digest.

        Raises RegistryError when the answer is another range, or the whole blob with status 200 (which is not read).
        """
        what = f"bytes {offset} to {offset + length - 1} of the blob {digest}"
        asked = f"bytes={offset}-{offset + length - 1}"
        with self._request("GET", f"{name}/blobs/{digest}", what, range=asked) as response:
            if response.status_code == 404:
                raise BlobUnknown(f"registry {self.host} has no blob {digest} in {name}{_said(response)}")
            if response.status_code == 200:
                raise RegistryError(f"registry {self.host} answered a range with 200: {what}, expected 206", status=200)
            self._expect(response, (206,), what)
            found = parse_content_range(response.headers.get("content-range"))
            if found is None or found[:2] != (offset, length):
                said = response.headers.get("content-range", "no Content-Range")
                raise RegistryError(f"registry {self.host} sent {show(said)}, expected {what}", status=206)
            data = bytearray()
            for piece in self._body(response, what, length):
                data += piece
                if len(data) > length:
                    break
            if len(data) != length:
                raise RegistryError(f"registry {self.host} sent {len(data)} bytes or more, expected {what}", status=206)
            return bytes(data)

    def put_blob(
        self, name: str, digest: str, size: int, content: Callable[[], Iterable[bytes]], *, ask: bool = True
    ) -> bool:
        """Send a blob unless the registry has it; whether it was sent. ``content`` is called when it is needed.

        ask: False when the registry was asked already. Raises what ``content`` raises, and RegistryError.
        """
        if ask and self.blob_size(name, digest) == size:
            return False
        what = f"the blob {digest}"
        with self._request("POST", f"{name}/blobs/uploads/", what, content=b"") as response:
            self._expect(response, (202,), f"an upload of {what}")
            location = response.headers.get("location")
        if not location:
            raise RegistryError(f"registry {self.host} gave no Location for an upload of {what}", status=202)
        with self._translated(f"the Location {show(location)} for an upload", 0, None):
            url = self._http.base_url.join(location).copy_merge_params({"digest": digest})
        with self._request("PUT", str(url), what, content=content(), size=size) as response:
            self._expect(response, (201, 204), f"an upload of {what}")
        return True

    def mount_blob(self, name: str, digest: str, origin: str) -> bool:
        """Ask the registry to take a blob of another of its repositories; whether it did."""
        what = f"the blob {digest}"
        query = httpx.QueryParams({"mount": digest, "from": origin})
        with self._request("POST", f"{name}/blobs/uploads/?{query}", what, content=b"") as response:
            self._expect(response, (201, 202), f"a mount of {what}")
            return response.status_code == 201

    # Requests

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        what: str,
        *,
        accept: Iterable[str] = (),
        range: str | None = None,
        content: bytes | Iterable[bytes] | None = None,
        content_type: str = "application/octet-stream",
        size: int | None = None,
    ) -> Iterator[httpx.Response]:
        headers = {"Accept": ", ".join(accept) or "*/*"}
        timeout = self._timeout
        if range is not None:
            headers["Range"] = range
        if content is not None:
            headers["Content-Type"] = content_type
            headers["Content-Length"] = str(len(content) if isinstance(content, bytes) else size)
            timeout = httpx.Timeout(SILENCE_TIMEOUT, connect=CONNECT_TIMEOUT, read=COMMIT_TIMEOUT)
        with self._translated(what, 0, size):
            request = self._http.build_request(method, path, headers=headers, content=content, timeout=timeout)
            response = self._http.send(request, stream=True)
        try:
            yield response
        finally:
            response.close()

    def _body(self, response: httpx.Response, what: str, size: int | None = None) -> Iterator[bytes]:
        with self._translated(what, response, size):
            yield from response.iter_raw(BLOCK)

    @contextmanager
    def _translated(self, what: str, response: httpx.Response | int, size: int | None) -> Iterator[None]:
        """Turn httpx's errors into one line each."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:  # of names in IDNA
            done = response.num_bytes_downloaded if isinstance(response, httpx.Response) else None
            raise _explain(error, self.host, what, done, size) from error

    def _check_length(self, response: httpx.Response, found: int, what: str) -> None:
        promised = response.headers.get("content-length")
        if promised is not None and promised != str(found):
            raise IntegrityError(f"{what} from {self.host}: found {found} bytes, Content-Length is {show(promised)}")

    def _expect(self, response: httpx.Response, good: tuple[int, ...], what: str) -> None:
        """Raise RegistryError unless the status is one of ``good``."""
        status = response.status_code
        if status in good:
            return
        code, message = _error_of(response)
        detail = f": {message}" if message else ""
        if status == 401:
            text = f"registry {self.host} wants credentials for {what} (401); dsec cannot give any yet{detail}"
        elif status == 403:
            text = f"registry {self.host} forbids access to {what} (403){detail}"
        elif status == 404:
            text = f"registry {self.host} does not know {what} (404){detail}"
        elif status == 429:
            text = f"registry {self.host} refuses {what} for now: too many requests (429){detail}"
        else:
            text = f"registry {self.host} answered {what} with {status}{detail}, expected {' or '.join(map(str, good))}"
        raise RegistryError(text, status=status, code=code)


def _join(name: str, reference: str) -> str:
    return f"{name}@{reference}" if is_digest(reference) else f"{name}:{reference}"


def _error_of(response: httpx.Response) -> tuple[str, str]:
    """Code and message of an OCI error body, where there is one; at most 64 KiB of it is read."""
    try:
        body = b""
        for piece in response.iter_raw(65536):
            body += piece
            if len(body) >= 65536:
                break
        first: Any = json.loads(body)["errors"][0]
        code, message = str(first.get("code", "")), str(first.get("message", ""))
    except (httpx.HTTPError, httpx.StreamError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "", ""
    return code[:100], " ".join(f"{code}: {message}".split())[:300]


def _said(response: httpx.Response) -> str:
    message = _error_of(response)[1]
    return f" ({message})" if message else ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _explain(error: Exception, host: str, what: str, done: int | None, size: int | None) -> RegistryError:
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            return RegistryUnreachable(f"cannot reach registry {host}: no such host ({cause.strerror})")
        if isinstance(cause, ssl.SSLCertVerificationError):
            return RegistryUnreachable(
                f"cannot reach registry {host}: its certificate is not valid: {cause.verify_message}"
            )
        if isinstance(cause, ssl.SSLError):
            reason = (cause.reason or str(cause)).lower().replace("_", " ")
            return RegistryUnreachable(
                f"cannot reach registry {host}: no TLS there ({reason}); a registry without TLS needs --plain-http"
            )
        if isinstance(error, httpx.ConnectError) and isinstance(cause, OSError) and cause.strerror:
            return RegistryUnreachable(f"cannot reach registry {host}: {cause.strerror.lower()}")
    if isinstance(error, httpx.ConnectTimeout):
        return RegistryUnreachable(f"cannot reach registry {host}: no answer within {CONNECT_TIMEOUT:.0f} s")
    if isinstance(error, httpx.TimeoutException):
        return RegistryUnreachable(f"registry {host} fell silent during {what}")
    if isinstance(error, httpx.ConnectError):
        return RegistryUnreachable(f"cannot reach registry {host}: {error}")
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError | httpx.CloseError):
        place = f" after {done} of {size} bytes" if done is not None and size is not None else ""
        return RegistryError(f"registry {host} hung up{place} during {what}")
    if isinstance(error, httpx.TooManyRedirects):
        return RegistryError(f"registry {host} redirects {what} in a circle")
    return RegistryError(f"registry {host}, {what}: {error or type(error).__name__}")
