"""What a reference may be, above all its host: whatever passes can be handed to a resolver."""

from __future__ import annotations

import pytest

from dsec_store.errors import ReferenceInvalid, RegistryError
from dsec_store.refs import parse_reference
from dsec_store.registry.serve import listen


@pytest.mark.parametrize(
    "host",
    [
        *("a.b", "localhost", "localhost:5000", "r.example.org:443", "127.0.0.1:1", "[::1]:5000", "[fe80::1]"),
        *("x-1.y", "1.2", "a" * 63 + ".b", ".".join(["a" * 49] * 5), "xn--nxasmq6b.example"),
    ],
)
def test_a_host_of_the_dns_or_an_address_is_taken(host: str) -> None:
    found = parse_reference(f"{host}/team/a:1")
    assert (found.host, found.name, found.tag) == (host, "team/a", "1")
    b"x".join([host.encode("idna")])  # what Python does on the way to the resolver


@pytest.mark.parametrize(
    "host",
    [
        *("a..b", ".a.b", "a.b.", "a" * 64 + ".b", ".".join(["a" * 50] * 6), "-a.b", "a-.b", "a_b.c", "a.b:0"),
        *(
            "a.b:65536",
            "a.b:",
            "[::1",
            "[:::]:1",
            "[1.2.3]:4",
            "[]:1",
            "999.1.1.1",
            "1.2.3.4.5:x",
            "[1.2.3.4]:1",
            "a" * 300 + ".b",
            "é.b",
            "a b.c",
            ":1",
        ),
    ],
)
def test_a_host_that_cannot_be_is_one_line(host: str) -> None:
    with pytest.raises(ReferenceInvalid) as caught:
        parse_reference(f"{host}/a:1")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700


def test_a_long_text_is_cut_in_the_message() -> None:
    with pytest.raises(ReferenceInvalid) as caught:
        parse_reference("A" * 100_000)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("address", ["a" * 300 + ":1", "a..b:1", "é" * 80 + ":1", "127.0.0.1:" + "9" * 5000, "1:x"])
def test_an_address_that_cannot_be_listened_on_is_one_line(address: str) -> None:
    with pytest.raises(RegistryError) as caught:
        listen(address)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
