"""The registry's API, spoken to by a plain HTTP client: manifests, blobs, ranges, uploads, and its refusals."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dsec_store import media
from dsec_store.backends.local import LocalBackend
from dsec_store.manifest import MANIFEST_MAX
from dsec_store.registry.ranges import Unsatisfiable, parse_content_range, parse_range
from tests.servers import registry_thread
from tests.waiting import until


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# One server for all tests of this file: each uses names of its own, and compares the store with what it was.


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LocalBackend:
    return LocalBackend(tmp_path_factory.mktemp("registry") / "store")


@pytest.fixture(scope="module")
def host(backend: LocalBackend) -> Iterator[str]:
    with registry_thread(backend) as host:
        yield host


@pytest.fixture(scope="module")
def http(host: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{host}", trust_env=False) as client:
        yield client


def put(backend: LocalBackend, data: bytes) -> str:
    with backend.writer() as writer:
        writer.write(data)
        return writer.commit()[0]


def descriptor(data: bytes, media_type: str = "application/octet-stream") -> dict[str, Any]:
    return {"mediaType": media_type, "digest": sha256(data), "size": len(data)}


def manifest_of(config: bytes, *layers: bytes, **more: Any) -> bytes:
    document = {
        "schemaVersion": 2,
        "mediaType": media.OCI_MANIFEST,
        "config": descriptor(config, "application/vnd.oci.empty.v1+json"),
        "layers": [descriptor(layer) for layer in layers],
        **more,
    }
    return json.dumps(document).encode()


def files(backend: LocalBackend) -> list[str]:
    """Everything in the store, descriptors without names too."""
    named = [str(path) for path in backend.root.rglob("*") if path.is_file() and path.name != "lock"]
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return named + [link for link in links if link.startswith(str(backend.root))]


def error_of(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/json"
    errors = response.json()["errors"]
    assert errors and errors[0]["message"]
    return str(errors[0]["code"])


# Ranges


@pytest.mark.parametrize(
    ("header", "size", "expected"),
    [
        (None, 10, None),
        ("bytes=0-3", 10, (0, 4)),
        ("bytes=3-", 10, (3, 7)),
        ("bytes=-3", 10, (7, 3)),
        ("bytes=-30", 10, (0, 10)),
        ("bytes=5-100", 10, (5, 5)),
        ("Bytes=9-9", 10, (9, 1)),
        ("bytes= 1 - 2 ", 10, (1, 2)),
        ("bytes=4-3", 10, None),
        ("bytes=-", 10, None),
        ("bytes=", 10, None),
        ("bytes=a-b", 10, None),
        ("bytes=0-1,3-4", 10, None),
        ("pages=0-1", 10, None),
        ("bytes", 10, None),
        ("bytes=0-" + "9" * 5000, 10, None),
        ("bytes=0-\u0661", 10, None),
        ("bytes=-3", 0, Unsatisfiable),
        ("bytes=10-", 10, Unsatisfiable),
        ("bytes=10-12", 10, Unsatisfiable),
        ("bytes=0-0", 0, Unsatisfiable),
        ("bytes=-0", 10, Unsatisfiable),
    ],
)
def test_ranges_are_read_as_the_rfc_says(header: str | None, size: int, expected: Any) -> None:
    if expected is Unsatisfiable:
        with pytest.raises(Unsatisfiable):
            parse_range(header, size)
    else:
        assert parse_range(header, size) == expected


def test_content_range_is_read_strictly() -> None:
    assert parse_content_range("bytes 5-9/20") == (5, 5, 20)
    assert parse_content_range("bytes 5-9/*") == (5, 5, None)
    for bad in (None, "bytes 0-1/" + "9" * 5000, "", "bytes */20", "bytes 9-5/20", "bytes 5-9", "items 5-9/20"):
        assert parse_content_range(bad) is None


# Blobs


def test_a_blob_is_served_whole(backend: LocalBackend, http: httpx.Client) -> None:
    data = os.urandom(3_500_000)
    digest = put(backend, data)
    answer = http.get(f"/v2/any/name/blobs/{digest}")
    assert answer.status_code == 200
    assert answer.content == data
    assert answer.headers["content-length"] == str(len(data))
    assert answer.headers["docker-content-digest"] == digest
    assert answer.headers["etag"] == f'"{digest}"'
    assert answer.headers["accept-ranges"] == "bytes"


def test_head_of_a_blob_has_the_size_and_no_body(backend: LocalBackend, http: httpx.Client) -> None:
    digest = put(backend, b"x" * 1000)
    answer = http.head(f"/v2/a/blobs/{digest}")
    assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, "1000", b"")


def test_an_empty_blob_is_served(backend: LocalBackend, http: httpx.Client) -> None:
    digest = put(backend, b"")
    answer = http.get(f"/v2/a/blobs/{digest}")
    assert (answer.status_code, answer.headers["content-length"], answer.content) == (200, "0", b"")


@pytest.mark.parametrize(
    ("header", "offset", "length"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=100-199", 100, 100),
        ("bytes=-7", 2_499_993, 7),
        ("bytes=2499999-", 2_499_999, 1),
        ("bytes=1-2400000", 1, 2_400_000),
        ("bytes=2000000-9999999", 2_000_000, 500_000),
    ],
)
def test_a_range_is_answered_with_206(
    backend: LocalBackend, http: httpx.Client, header: str, offset: int, length: int
) -> None:
    data = os.urandom(2_500_000)
    digest = put(backend, data)
    answer = http.get(f"/v2/a/blobs/{digest}", headers={"Range": header})
    assert answer.status_code == 206
    assert answer.headers["content-range"] == f"bytes {offset}-{offset + length - 1}/{len(data)}"
    assert answer.headers["content-length"] == str(length)
    assert answer.content == data[offset : offset + length]


def test_a_range_outside_the_blob_is_answered_with_416(backend: LocalBackend, http: httpx.Client) -> None:
    digest = put(backend, b"0123456789")
    answer = http.get(f"/v2/a/blobs/{digest}", headers={"Range": "bytes=10-"})
    assert answer.status_code == 416
    assert answer.headers["content-range"] == "bytes */10"
    assert error_of(answer) == "SIZE_INVALID"


def test_several_ranges_are_answered_with_the_whole_blob(backend: LocalBackend, http: httpx.Client) -> None:
    digest = put(backend, b"0123456789")
    answer = http.get(f"/v2/a/blobs/{digest}", headers={"Range": "bytes=0-1,4-5"})
    assert (answer.status_code, answer.content) == (200, b"0123456789")


def test_if_range_decides_between_part_and_whole(backend: LocalBackend, http: httpx.Client) -> None:
    digest = put(backend, b"0123456789")
    for tag, status in ((f'"{digest}"', 206), ('"another"', 200)):
        answer = http.get(f"/v2/a/blobs/{digest}", headers={"Range": "bytes=0-1", "If-Range": tag})
        assert answer.status_code == status


def test_what_a_client_has_is_not_sent_again(backend: LocalBackend, http: httpx.Client) -> None:
    digest = put(backend, b"0123456789")
    answer = http.get(f"/v2/a/blobs/{digest}", headers={"If-None-Match": f'"x", "{digest}"'})
    assert (answer.status_code, answer.content) == (304, b"")


def test_many_ranges_over_one_connection(backend: LocalBackend, http: httpx.Client) -> None:
    data = os.urandom(1_000_000)
    digest = put(backend, data)
    for at in range(0, 1_000_000, 50_000):
        answer = http.get(f"/v2/a/blobs/{digest}", headers={"Range": f"bytes={at}-{at + 999}"})
        assert answer.content == data[at : at + 1000]


def test_a_client_that_hangs_up_during_a_download_costs_no_descriptor(backend: LocalBackend, host: str) -> None:
    digest = put(backend, bytes(40 << 20))
    for _ in range(5):
        with httpx.stream("GET", f"http://{host}/v2/a/blobs/{digest}", trust_env=False) as answer:
            next(answer.iter_raw(1000))
    path = str(backend.local_path(digest))
    until(lambda: files(backend).count(path) == 1, "the registry to close the blob")


def test_a_blob_that_shrinks_while_it_is_sent_ends_the_connection(backend: LocalBackend, host: str) -> None:
    digest = put(backend, bytes(64 << 20))
    with httpx.stream("GET", f"http://{host}/v2/a/blobs/{digest}", trust_env=False) as answer:
        pieces = answer.iter_raw(1000)
        next(pieces)
        os.truncate(backend.local_path(digest), 1 << 20)
        with pytest.raises(httpx.RemoteProtocolError):
            sum(map(len, pieces))
    backend.delete(digest)


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        (f"/v2/a/blobs/sha256:{'0' * 64}", 404, "BLOB_UNKNOWN"),
        ("/v2/a/blobs/sha256:123", 400, "DIGEST_INVALID"),
        ("/v2/a/blobs/md5:d41d8cd98f00b204e9800998ecf8427e", 400, "DIGEST_INVALID"),
        (f"/v2/A/blobs/sha256:{'0' * 64}", 400, "NAME_INVALID"),
        (f"/v2/a//b/blobs/sha256:{'0' * 64}", 400, "NAME_INVALID"),
        (f"/v2/../../etc/blobs/sha256:{'0' * 64}", 404, "UNSUPPORTED"),
        (f"/v2/a/%2e%2e/%2e%2e/b/blobs/sha256:{'0' * 64}", 400, "NAME_INVALID"),
        ("/v2/a/blobs/..%2f..%2f..%2fetc%2fpasswd", 404, "UNSUPPORTED"),
        ("/v2/none/manifests/latest", 404, "MANIFEST_UNKNOWN"),
        (f"/v2/a/manifests/sha256:{'0' * 64}", 404, "MANIFEST_UNKNOWN"),
        ("/v2/a/manifests/sha256:zz", 400, "DIGEST_INVALID"),
        ("/v2/a/manifests/-bad", 404, "MANIFEST_UNKNOWN"),
        ("/v2/none/tags/list", 404, "NAME_UNKNOWN"),
        ("/v1/", 404, "UNSUPPORTED"),
        ("/", 404, "UNSUPPORTED"),
    ],
)
def test_refusals_have_the_codes_of_the_spec(http: httpx.Client, path: str, status: int, code: str) -> None:
    answer = http.send(http.build_request("GET", httpx.URL(http.base_url, raw_path=path.encode())))
    assert (answer.status_code, error_of(answer)) == (status, code)


@pytest.mark.parametrize("method", ["DELETE", "PATCH", "POST"])
def test_what_is_not_there_yet_is_unsupported(http: httpx.Client, method: str) -> None:
    answer = http.request(method, f"/v2/a/blobs/sha256:{'0' * 64}")
    assert (answer.status_code, error_of(answer)) == (405, "UNSUPPORTED")
    assert answer.headers["allow"] == "GET, HEAD"


def test_the_base_says_which_api_it_is(http: httpx.Client) -> None:
    for path in ("/v2/", "/v2"):
        answer = http.get(path)
        assert answer.status_code == 200
        assert answer.headers["docker-distribution-api-version"] == "registry/2.0"


# Uploads


def test_an_upload_in_one_request(backend: LocalBackend, http: httpx.Client) -> None:
    data = os.urandom(2_500_000)
    answer = http.post("/v2/a/b/blobs/uploads/", params={"digest": sha256(data)}, content=data)
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/v2/a/b/blobs/{sha256(data)}"
    assert answer.headers["docker-content-digest"] == sha256(data)
    assert http.get(answer.headers["location"]).content == data


def test_an_upload_in_two_requests(backend: LocalBackend, http: httpx.Client) -> None:
    data = os.urandom(1000)
    begun = http.post("/v2/a/blobs/uploads/")
    assert begun.status_code == 202
    answer = http.put(begun.headers["location"], params={"digest": sha256(data)}, content=data)
    assert answer.status_code == 201
    assert backend.read(sha256(data)) == data


def test_a_chunked_body_is_taken(backend: LocalBackend, http: httpx.Client) -> None:
    data = os.urandom(300_000)
    pieces = (data[at : at + 7000] for at in range(0, len(data), 7000))
    assert http.post("/v2/a/blobs/uploads/", params={"digest": sha256(data)}, content=pieces).status_code == 201
    assert backend.read(sha256(data)) == data


def test_an_empty_blob_can_be_uploaded(backend: LocalBackend, http: httpx.Client) -> None:
    assert http.post("/v2/a/blobs/uploads/", params={"digest": sha256(b"")}, content=b"").status_code == 201
    assert backend.stat(sha256(b"")) == 0


def test_uploading_again_is_fine(backend: LocalBackend, http: httpx.Client) -> None:
    for _ in range(2):
        assert http.post("/v2/a/blobs/uploads/", params={"digest": sha256(b"x")}, content=b"x").status_code == 201


def test_uploading_again_repairs_a_damaged_blob(backend: LocalBackend, http: httpx.Client) -> None:
    data = b"to be damaged" * 100
    for _ in range(2):
        http.post("/v2/a/blobs/uploads/", params={"digest": sha256(data)}, content=data).raise_for_status()
        assert backend.read(sha256(data)) == data
        backend.local_path(sha256(data)).write_bytes(data.upper())
    backend.delete(sha256(data))


def test_a_damaged_manifest_is_said_and_repaired_by_a_push(backend: LocalBackend, http: httpx.Client) -> None:
    put(backend, b"{}")
    manifest = manifest_of(b"{}")
    headers = {"Content-Type": media.OCI_MANIFEST}
    http.put("/v2/hurt/manifests/t", content=manifest, headers=headers).raise_for_status()
    backend.local_path(sha256(manifest)).write_bytes(b"junk")
    for reference in ("t", sha256(manifest)):
        answer = http.get(f"/v2/hurt/manifests/{reference}")
        assert answer.status_code == 500
        assert sha256(manifest) in answer.text and sha256(b"junk") in answer.text
    http.put("/v2/hurt/manifests/t", content=manifest, headers=headers).raise_for_status()
    assert http.get("/v2/hurt/manifests/t").content == manifest


def test_wrong_bytes_leave_nothing(backend: LocalBackend, http: httpx.Client) -> None:
    before = files(backend)
    answer = http.post("/v2/a/blobs/uploads/", params={"digest": sha256(b"this")}, content=b"that")
    assert (answer.status_code, error_of(answer)) == (400, "DIGEST_INVALID")
    assert files(backend) == before


def test_an_upload_needs_its_number_and_a_digest(http: httpx.Client) -> None:
    answer = http.put("/v2/a/blobs/uploads/123", params={"digest": sha256(b"x")}, content=b"x")
    assert (answer.status_code, error_of(answer)) == (404, "BLOB_UPLOAD_UNKNOWN")
    location = http.post("/v2/a/blobs/uploads/").headers["location"]
    answer = http.put(location, content=b"x")
    assert (answer.status_code, error_of(answer)) == (400, "DIGEST_INVALID")
    answer = http.post("/v2/a/blobs/uploads/", params={"digest": "sha256:x"}, content=b"x")
    assert (answer.status_code, error_of(answer)) == (400, "DIGEST_INVALID")


def test_a_blob_that_is_here_is_mounted(backend: LocalBackend, http: httpx.Client) -> None:
    digest = put(backend, b"here")
    assert http.post("/v2/b/blobs/uploads/", params={"mount": digest, "from": "a"}).status_code == 201
    missing = http.post("/v2/b/blobs/uploads/", params={"mount": sha256(b"no"), "from": "a"})
    assert missing.status_code == 202
    assert "location" in missing.headers


def test_a_client_that_hangs_up_during_an_upload_leaves_nothing(backend: LocalBackend, host: str) -> None:
    address, port = host.split(":")
    before = files(backend)
    with socket.create_connection((address, int(port))) as sock:
        head = f"POST /v2/a/blobs/uploads/?digest={sha256(b'x')} HTTP/1.1\r\nHost: {host}\r\n"
        sock.sendall(head.encode() + b"Content-Length: 9000000\r\n\r\n" + bytes(4_000_000))
        until(lambda: len(files(backend)) > len(before), "the upload to begin")
    until(lambda: files(backend) == before, "the upload to be dropped")


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small], check=True)
    try:
        backend = LocalBackend(small / "store")
        with registry_thread(backend) as host, httpx.Client(base_url=f"http://{host}", trust_env=False) as http:
            data = os.urandom(20_000_000)
            answer = http.post("/v2/a/blobs/uploads/", params={"digest": sha256(data)}, content=data)
            assert answer.status_code == 507
            assert "no space left" in answer.json()["errors"][0]["message"]
            assert files(backend) == []
            data = os.urandom(1_000_000)
            assert http.post("/v2/a/blobs/uploads/", params={"digest": sha256(data)}, content=data).status_code == 201
    finally:
        subprocess.run(["umount", small], check=True)


# Manifests


def test_a_manifest_is_found_by_tag_and_digest_with_its_own_type(backend: LocalBackend, http: httpx.Client) -> None:
    put(backend, b"{}")
    put(backend, b"layer")
    data = manifest_of(b"{}", b"layer", artifactType="application/vnd.example")
    answer = http.put("/v2/found/b/manifests/v1", content=data, headers={"Content-Type": media.OCI_MANIFEST})
    assert answer.status_code == 201
    assert answer.headers["docker-content-digest"] == sha256(data)
    for reference in ("v1", sha256(data)):
        for method in ("GET", "HEAD"):
            answer = http.request(method, f"/v2/found/b/manifests/{reference}")
            assert answer.status_code == 200
            assert answer.headers["content-type"] == media.OCI_MANIFEST
            assert answer.headers["docker-content-digest"] == sha256(data)
            assert answer.headers["etag"] == f'"{sha256(data)}"'
            assert answer.headers["content-length"] == str(len(data))
            assert answer.content == (data if method == "GET" else b"")
    assert backend.get_ref("found/b", "v1") == sha256(data)


def test_a_manifest_by_digest_sets_no_tag(backend: LocalBackend, http: httpx.Client) -> None:
    put(backend, b"{}")
    data = manifest_of(b"{}")
    assert http.put(f"/v2/untagged/manifests/{sha256(data)}", content=data).status_code == 201
    assert list(backend.refs("untagged")) == []


def test_a_tag_can_be_moved(backend: LocalBackend, http: httpx.Client) -> None:
    put(backend, b"{}")
    for note in ("one", "two"):
        data = manifest_of(b"{}", annotations={"note": note})
        assert http.put("/v2/a/manifests/v1", content=data).status_code == 201
        assert http.get("/v2/a/manifests/v1").content == data


def test_an_index_needs_its_manifests(backend: LocalBackend, http: httpx.Client) -> None:
    put(backend, b"{}")
    inner = manifest_of(b"{}", annotations={"of": "the index"})
    index = json.dumps(
        {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [descriptor(inner, media.OCI_MANIFEST)]}
    ).encode()
    answer = http.put("/v2/a/manifests/v1", content=index)
    assert (answer.status_code, error_of(answer)) == (400, "MANIFEST_BLOB_UNKNOWN")
    assert sha256(inner) in answer.json()["errors"][0]["message"]
    assert http.put(f"/v2/a/manifests/{sha256(inner)}", content=inner).status_code == 201
    assert http.put("/v2/a/manifests/v1", content=index).status_code == 201
    assert http.get("/v2/a/manifests/v1").headers["content-type"] == media.OCI_INDEX


def test_a_manifest_without_media_type_is_known_by_its_shape(backend: LocalBackend, http: httpx.Client) -> None:
    put(backend, b"{}")
    document = json.loads(manifest_of(b"{}"))
    del document["mediaType"]
    assert http.put("/v2/a/manifests/v1", content=json.dumps(document)).status_code == 201
    assert http.get("/v2/a/manifests/v1").headers["content-type"] == media.OCI_MANIFEST


def test_a_subject_may_come_later(backend: LocalBackend, http: httpx.Client) -> None:
    put(backend, b"{}")
    data = manifest_of(b"{}", subject=descriptor(b"not here", media.OCI_MANIFEST))
    answer = http.put("/v2/a/manifests/v1", content=data)
    assert answer.status_code == 201
    assert "oci-subject" not in answer.headers


_NO_BLOB = manifest_of(b"{}", b"missing")
_WRONG_SIZE = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": media.OCI_MANIFEST,
        "config": {**descriptor(b"{}"), "size": 3},
        "layers": [],
    }
).encode()


@pytest.mark.parametrize(
    ("data", "path", "headers", "status", "code"),
    [
        (_NO_BLOB, "v1", {}, 400, "MANIFEST_BLOB_UNKNOWN"),
        (_WRONG_SIZE, "v1", {}, 400, "SIZE_INVALID"),
        (b"{", "v1", {}, 400, "MANIFEST_INVALID"),
        (b"[]", "v1", {}, 400, "MANIFEST_INVALID"),
        (b"\xff\xfe", "v1", {}, 400, "MANIFEST_INVALID"),
        (b'{"schemaVersion":1}', "v1", {}, 400, "MANIFEST_INVALID"),
        (b'{"schemaVersion":2}', "v1", {}, 400, "MANIFEST_INVALID"),
        (b'{"schemaVersion":2,"mediaType":"text/html"}', "v1", {}, 400, "MANIFEST_INVALID"),
        (b'{"schemaVersion":2,"config":{},"layers":[]}', "v1", {}, 400, "MANIFEST_INVALID"),
        (b'{"schemaVersion":2,"manifests":[1]}', "v1", {}, 400, "MANIFEST_INVALID"),
        (b'{"a":' * 100_000, "v1", {}, 400, "MANIFEST_INVALID"),
        (manifest_of(b"{}"), "v1", {"Content-Type": media.OCI_INDEX}, 400, "MANIFEST_INVALID"),
        (manifest_of(b"{}"), sha256(b"another"), {}, 400, "DIGEST_INVALID"),
        (manifest_of(b"{}"), "-bad", {}, 400, "TAG_INVALID"),
        (b" " * (MANIFEST_MAX + 1), "v1", {}, 413, "SIZE_INVALID"),
    ],
)
def test_a_bad_manifest_is_refused_and_not_kept(
    backend: LocalBackend, http: httpx.Client, data: bytes, path: str, headers: dict[str, str], status: int, code: str
) -> None:
    put(backend, b"{}")
    before = files(backend)
    answer = http.put(f"/v2/a/manifests/{path}", content=data, headers=headers)
    assert (answer.status_code, error_of(answer)) == (status, code)
    assert files(backend) == before


def test_a_blob_that_is_no_manifest_is_not_served_as_one(backend: LocalBackend, http: httpx.Client) -> None:
    for data in (b"not JSON", b"{}", bytes(MANIFEST_MAX + 1)):
        answer = http.get(f"/v2/a/manifests/{put(backend, data)}")
        assert (answer.status_code, error_of(answer)) == (404, "MANIFEST_UNKNOWN")


def test_tags_are_listed_in_pages(backend: LocalBackend, http: httpx.Client) -> None:
    digest = put(backend, b"x")
    for name, tag in (("paged", "2"), ("paged", "1"), ("paged", "3"), ("paged/b", "4")):
        backend.put_ref(name, tag, digest)
    assert http.get("/v2/paged/tags/list").json() == {"name": "paged", "tags": ["1", "2", "3"]}
    assert http.get("/v2/paged/tags/list?n=" + "9" * 5000).json()["tags"] == ["1", "2", "3"]
    page = http.get("/v2/paged/tags/list?n=2")
    assert page.json()["tags"] == ["1", "2"]
    assert http.get(page.links["next"]["url"]).json()["tags"] == ["3"]
