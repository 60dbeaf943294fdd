"""The OCI Distribution API over a backend, as a Starlette application.

Served: manifests by tag and digest, blobs with ranges, monolithic uploads (one request, or POST and PUT), mounts of
blobs that are here, tag listing. Not yet, and answered with UNSUPPORTED: uploads in pieces (PATCH), deletion.
Blobs belong to the whole store: a name is only needed to speak of a manifest by its tag.

The backend is synchronous; each call runs in a thread.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dsec_store.backends.base import Backend, BlobWriter
from dsec_store.canonical import parse_json_object
from dsec_store.digests import digest_of, is_digest
from dsec_store.errors import BlobUnknown, DsecError, IntegrityError, ReferenceUnknown, StoreFull
from dsec_store.manifest import MANIFEST_MAX
from dsec_store.refs import valid_name, valid_tag
from dsec_store.registry.oci import API_VERSION, Code, Needed, Problem, media_type_of, needed_by
from dsec_store.registry.streaming import BlobPart, BlobResponse
from erofs_tools.errors import show

log = logging.getLogger(__name__)

WRITE_BLOCK = 1 << 20
STALLED = 60.0
"""Seconds without a byte after which an upload is given up."""
TAGS_MAX = 10_000

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


def create_app(backend: Backend, *, threads: int = 16) -> Starlette:
    """The application. threads: how many backend calls run at once."""
    registry = _Registry(backend, threads)
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]

    def route(path: str, **handlers: Handler) -> Route:
        return Route(path, partial(registry.dispatch, handlers), methods=methods)

    return Starlette(
        routes=[
            route("/v2", GET=registry.base),
            route("/v2/", GET=registry.base),
            route("/v2/{name:path}/manifests/{reference}", GET=registry.get_manifest, PUT=registry.put_manifest),
            route("/v2/{name:path}/blobs/uploads/", POST=registry.start_upload),
            route("/v2/{name:path}/blobs/uploads", POST=registry.start_upload),
            route("/v2/{name:path}/blobs/uploads/{upload}", PUT=registry.finish_upload, DELETE=registry.cancel_upload),
            route("/v2/{name:path}/blobs/{digest}", GET=registry.get_blob),
            route("/v2/{name:path}/tags/list", GET=registry.list_tags),
            route("/{rest:path}", GET=registry.nothing_here),
        ]
    )


class _Registry:
    def __init__(self, backend: Backend, threads: int) -> None:
        self.backend = backend
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="registry")
        self._key = secrets.token_bytes(32)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call the backend in a thread. Its ReferenceInvalid and BlobUnknown pass through."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args))

    async def dispatch(self, handlers: dict[str, Handler], request: Request) -> Response:
        """Find the method's handler, and turn every failure into an error of the API."""
        try:
            name = request.path_params.get("name")
            if name is not None and not valid_name(name):
                raise Problem(400, Code.NAME_INVALID, f"not a repository name: {show(name)}")
            handler = handlers.get("GET" if request.method == "HEAD" else request.method)
            if handler is None:
                allow = ", ".join([*handlers, *(["HEAD"] if "GET" in handlers else [])])
                message = f"{request.method} is not supported for {request.url.path}"
                raise Problem(405, Code.UNSUPPORTED, message, {"Allow": allow})
            return await handler(request)
        except Problem as problem:
            return self._refuse(request, problem)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except StoreFull as error:
            return self._refuse(request, Problem(507, Code.UNKNOWN, str(error)))
        except (DsecError, OSError) as error:
            log.error("%s %s: %s", request.method, request.url.path, error)
            return self._refuse(request, Problem(500, Code.UNKNOWN, str(error)))

    def _refuse(self, request: Request, problem: Problem) -> Response:
        body = problem.body()
        headers = {**dict([API_VERSION]), **problem.headers, "Content-Length": str(len(body))}
        return Response(body, problem.status, headers, "application/json")

    async def base(self, request: Request) -> Response:
        return Response(b"{}", headers=dict([API_VERSION]), media_type="application/json")

    async def nothing_here(self, request: Request) -> Response:
        raise Problem(404, Code.UNSUPPORTED, f"nothing is served at {request.url.path}")

    # Manifests

    async def get_manifest(self, request: Request) -> Response:
        name, reference = request.path_params["name"], request.path_params["reference"]
        digest, data, media_type = await self.run(self._load_manifest, name, reference)
        headers = {"Docker-Content-Digest": digest, "ETag": f'"{digest}"', **dict([API_VERSION])}
        if _none_match(request, digest):
            return Response(status_code=304, headers=headers)
        headers["Content-Length"] = str(len(data))
        return Response(data, 200, headers, media_type)

    def _load_manifest(self, name: str, reference: str) -> tuple[str, bytes, str]:
        unknown = Problem(404, Code.MANIFEST_UNKNOWN, f"no manifest {name}:{reference}")
        if ":" in reference:
            digest = _digest(reference)
            unknown = Problem(404, Code.MANIFEST_UNKNOWN, f"no manifest {name}@{reference}")
        elif not valid_tag(reference):
            raise unknown
        else:
            try:
                digest = self.backend.get_ref(name, reference)
            except ReferenceUnknown:
                raise unknown from None
        try:
            if self.backend.stat(digest) > MANIFEST_MAX:  # a blob of another sort
                raise unknown
            data = self.backend.read(digest)
            if digest_of(data) != digest:
                message = f"the store's copy of {digest} is damaged: found {digest_of(data)}"
                raise Problem(500, Code.UNKNOWN, message)
            media_type = media_type_of(parse_json_object(data, "manifest"))
        except (BlobUnknown, IntegrityError):
            raise unknown from None
        if media_type is None:
            raise unknown
        return digest, data, media_type

    async def put_manifest(self, request: Request) -> Response:
        name, reference = request.path_params["name"], request.path_params["reference"]
        if ":" in reference:
            _digest(reference)
        elif not valid_tag(reference):
            raise Problem(400, Code.TAG_INVALID, f"not a tag: {show(reference)}")
        data = await self._small_body(request)
        try:
            document = parse_json_object(data, "manifest")
            media_type = media_type_of(document)
            if media_type is None:
                found = document.get("mediaType")
                raise IntegrityError(
                    f"manifest: schemaVersion {show(document.get('schemaVersion'))} of type {show(found)} is not known"
                )
            needed = list(needed_by(document))
        except IntegrityError as error:
            raise Problem(400, Code.MANIFEST_INVALID, str(error)) from None
        said = request.headers.get("content-type", "").partition(";")[0].strip()
        if said and said != media_type:
            raise Problem(400, Code.MANIFEST_INVALID, f"Content-Type is {said}, the manifest is {media_type}")
        digest = digest_of(data)
        if ":" in reference and reference != digest:
            raise Problem(400, Code.DIGEST_INVALID, f"the manifest's digest is {digest}, not {reference}")
        await self.run(self._store_manifest, name, None if ":" in reference else reference, data, digest, needed)
        headers = {"Location": f"/v2/{name}/manifests/{digest}", "Docker-Content-Digest": digest}
        # No OCI-Subject header for a manifest with a subject: without the referrers API it would say what is not so.
        return Response(status_code=201, headers={**headers, **dict([API_VERSION])})

    def _store_manifest(self, name: str, tag: str | None, data: bytes, digest: str, needed: list[Needed]) -> None:
        for item in needed:
            what = "manifest" if item.manifest else "blob"
            try:
                size = self.backend.stat(item.digest)
            except BlobUnknown:
                message = f"the {what} {item.digest} is not in this registry"
                raise Problem(400, Code.MANIFEST_BLOB_UNKNOWN, message) from None
            if size != item.size:
                message = f"the {what} {item.digest} has {size} bytes, the manifest says {item.size}"
                raise Problem(400, Code.SIZE_INVALID, message)
        with self.backend.writer() as writer:
            writer.write(data)
            if tag is None:
                writer.commit(digest)
            else:
                self.backend.publish([writer], name, tag, digest)

    async def _small_body(self, request: Request) -> bytes:
        body = bytearray()
        async for piece in _pieces(request):
            body += piece
            if len(body) > MANIFEST_MAX:
                raise Problem(413, Code.SIZE_INVALID, f"a manifest has at most {MANIFEST_MAX} bytes")
        return bytes(body)

    async def list_tags(self, request: Request) -> Response:
        name = request.path_params["name"]
        tags = await self.run(lambda: [ref.tag for ref in self.backend.refs(name) if ref.name == name])
        if not tags:
            raise Problem(404, Code.NAME_UNKNOWN, f"no tags of {name}")
        last, count = request.query_params.get("last"), request.query_params.get("n", "")
        tags = [tag for tag in tags if last is None or tag > last]
        limit = min(int(count), TAGS_MAX) if re.fullmatch(r"[0-9]{1,9}", count) else TAGS_MAX
        headers = dict([API_VERSION])
        if len(tags) > limit:
            tags = tags[:limit]
            if tags:
                headers["Link"] = f'</v2/{name}/tags/list?n={limit}&last={quote(tags[-1])}>; rel="next"'
        return Response(json.dumps({"name": name, "tags": tags}), 200, headers, "application/json")

    # Blobs

    async def get_blob(self, request: Request) -> Response:
        digest = _digest(request.path_params["digest"])
        if_range = request.headers.get("if-range")
        wanted = request.headers.get("range") if if_range in (None, f'"{digest}"') else None
        headers = {
            "Docker-Content-Digest": digest,
            "ETag": f'"{digest}"',
            "Accept-Ranges": "bytes",
            "Cache-Control": "max-age=31536000, immutable",
            **dict([API_VERSION]),
        }
        try:
            if request.method == "HEAD" or _none_match(request, digest):
                headers["Content-Length"] = str(await self.run(self.backend.stat, digest))
                if _none_match(request, digest):
                    del headers["Content-Length"]
                    return Response(status_code=304, headers=headers)
                return Response(status_code=200, headers=headers, media_type="application/octet-stream")
            part = await self.run(BlobPart.open, self.backend, digest, wanted)
        except BlobUnknown:
            raise Problem(404, Code.BLOB_UNKNOWN, f"no blob {digest}") from None
        if part.unsatisfiable:
            message = f"{wanted} is outside the blob of {part.size} bytes"
            raise Problem(416, Code.SIZE_INVALID, message, {"Content-Range": f"bytes */{part.size}"})
        return BlobResponse(self._pool, part, headers)

    async def start_upload(self, request: Request) -> Response:
        name, query = request.path_params["name"], request.query_params
        if "mount" in query:
            digest = query["mount"]
            if is_digest(digest) and await self.run(self.backend.has, digest):
                return self._created(name, digest)
        elif "digest" in query:
            return await self._receive(request, _digest(query["digest"]))
        location = f"/v2/{name}/blobs/uploads/{self._new_upload()}"
        headers = {"Location": location, "Range": "0-0", "Docker-Upload-UUID": location.rsplit("/", 1)[1]}
        return Response(status_code=202, headers={**headers, **dict([API_VERSION])})

    # An upload in one piece has no state between its two requests: its number is only known as ours.

    def _new_upload(self) -> str:
        number = secrets.token_hex(16)
        return number + hmac.digest(self._key, number.encode(), "sha256").hex()[:16]

    def _check_upload(self, request: Request) -> None:
        upload = request.path_params["upload"]
        number, proof = upload[:32], upload[32:]
        if not re.fullmatch(r"[0-9a-f]{48}", upload) or not hmac.compare_digest(
            proof, hmac.digest(self._key, number.encode(), "sha256").hex()[:16]
        ):
            raise Problem(404, Code.BLOB_UPLOAD_UNKNOWN, f"no upload {show(upload)}: start again with POST")

    async def finish_upload(self, request: Request) -> Response:
        self._check_upload(request)
        if "digest" not in request.query_params:
            raise Problem(400, Code.DIGEST_INVALID, "the last request of an upload must say ?digest=")
        return await self._receive(request, _digest(request.query_params["digest"]))

    async def cancel_upload(self, request: Request) -> Response:
        self._check_upload(request)
        return Response(status_code=204, headers=dict([API_VERSION]))

    async def _receive(self, request: Request, digest: str) -> Response:
        """Take a whole blob from the request's body. A client that goes away leaves nothing: the writer is dropped."""
        promised = request.headers.get("content-length")
        writer = _SerialWriter(await self.run(self.backend.writer))
        try:
            block = bytearray()
            async for piece in _pieces(request):
                block += piece
                if len(block) >= WRITE_BLOCK:
                    await self.run(writer.write, block)
                    block = bytearray()
            if block:
                await self.run(writer.write, block)
            await self.run(writer.commit, digest, promised)
        finally:
            await asyncio.shield(self.run(writer.close))
        return self._created(request.path_params["name"], digest)

    def _created(self, name: str, digest: str) -> Response:
        headers = {"Location": f"/v2/{name}/blobs/{digest}", "Docker-Content-Digest": digest, **dict([API_VERSION])}
        return Response(status_code=201, headers=headers)


def _digest(text: str) -> str:
    if not is_digest(text):
        raise Problem(
            400, Code.DIGEST_INVALID, f"not a digest: {show(text)}; expected sha256: and 64 hexadecimal digits"
        )
    return text


def _none_match(request: Request, digest: str) -> bool:
    tags = request.headers.get("if-none-match")
    return tags is not None and f'"{digest}"' in [tag.strip().removeprefix("W/") for tag in tags.split(",")]


async def _pieces(request: Request) -> Any:
    """The body as it comes; Problem 408 when it stalls, ClientDisconnect when the client has gone."""
    stream = request.stream().__aiter__()
    while True:
        try:
            async with asyncio.timeout(STALLED):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"no byte of the body came for {STALLED:.0f} s"
            raise Problem(408, Code.BLOB_UPLOAD_INVALID, message, {"Connection": "close"}) from None
        yield piece


class _SerialWriter:
    """A blob writer whose calls wait for each other: a cancelled task's write goes on in its thread, and closing the
    descriptor under it could let it write into whatever gets the number next."""

    def __init__(self, writer: BlobWriter) -> None:
        self._writer = writer
        self._closed = False
        self._lock = threading.Lock()

    def write(self, data: bytearray) -> None:
        with self._lock:
            if not self._closed:
                self._writer.write(data)

    def commit(self, digest: str, promised: str | None) -> None:
        with self._lock:
            size = self._writer.size
            if promised is not None and promised.isdecimal() and size != int(promised):
                raise Problem(400, Code.SIZE_INVALID, f"found {size} bytes, Content-Length is {promised}")
            try:
                if not self._closed:
                    self._writer.commit(digest)
            except IntegrityError as error:
                raise Problem(400, Code.DIGEST_INVALID, str(error)) from None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._writer.close()
