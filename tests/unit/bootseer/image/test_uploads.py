"""Uploads that break off: what a registry has is not sent again, where it says so; passwords stay with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bootseer.errors import DigestMismatch, StorageError, Unavailable
from bootseer.image import uploads
from bootseer.image.registry import Registry
from bootseer.storage.oci.manifest import Descriptor, digest_of
from bootseer.storage.oci.reference import parse_reference
from tests.testing.registry import Certificates, make_certificates, write_auth_file
from tests.testing.store_suite import pattern, runs
from tests.unit.bootseer.image.small_registry import SmallRegistry

CHUNK = 100_000
DATA = pattern(350_000)
SPANS = ["0-99999", "100000-199999", "200000-299999", "300000-349999"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "WHOLE_BYTES", CHUNK)
    monkeypatch.setattr(uploads, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(uploads, "RETRIES", uploads.RETRIES._replace(base_s=0.001, max_s=0.002))


@pytest.fixture
def small() -> Iterator[SmallRegistry]:
    registry = SmallRegistry()
    with registry.serve():
        yield registry


def options(auth_file: str = "/nowhere", **more: Any) -> dict[str, object]:
    return {"auth_file": auth_file, "certs_folders": [], "mirrors": "", "plain_http": "", **more}


NOWHERE = options()


async def push(
    small: SmallRegistry, data: bytes = DATA, *, digest: str = "", options: dict[str, object] = NOWHERE
) -> list[str]:
    """Which chunks were sent."""
    told: list[int] = []
    async with Registry(options=options) as registry:
        blob = Descriptor(media_type="text/plain", digest=digest or digest_of(data), size=len(data))
        reference = parse_reference(f"oci://{small.host}/a")
        await registry.push_blob(reference, blob, uploads.from_memory(data), told.append)
    assert sum(told) == len(data)
    assert small.blobs[blob.digest] == data
    return spans(small)


def spans(small: SmallRegistry) -> list[str]:
    return [each.headers["content-range"] for each in small.seen if each.method == "PATCH"]


@runs()
async def test_chunks(small: SmallRegistry) -> None:
    assert await push(small) == SPANS
    assert await push(small) == SPANS, "what is there is not sent"
    assert small.count("HEAD .*") == 2


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("kept", [0, 1, 30_000])
@runs()
async def test_a_chunk_goes_on_from_the_last_byte(place: int, kept: int, small: SmallRegistry) -> None:
    small.cuts = [*[None] * place, kept]
    first, last = SPANS[place].split("-")
    expected = [*SPANS[: place + 1], f"{int(first) + kept}-{last}", *SPANS[place + 1 :]]
    if place == 0 and kept == 1:  # registries say 0-0 for one byte, and for none
        expected = [SPANS[0], SPANS[0], *SPANS]
    assert await push(small) == expected


@runs()
async def test_many_cuts(small: SmallRegistry) -> None:
    small.cuts = [10, 20, 30]
    assert (await push(small))[:4] == ["0-99999", "10-99999", "30-99999", "60-99999"]


@runs()
async def test_an_upload_that_is_forgotten_begins_again(small: SmallRegistry) -> None:
    small.cuts, small.forgets = [50_000], True
    assert await push(small) == [SPANS[0], *SPANS]
    assert small.count("POST .*") == 2


@runs()
async def test_a_chunk_that_never_arrives(small: SmallRegistry) -> None:
    small.cuts = [0] * 100
    with pytest.raises(Unavailable):
        await push(small)
    assert len(spans(small)) == uploads.RETRIES.tries


@runs()
async def test_a_registry_that_wants_large_chunks(small: SmallRegistry) -> None:
    small.min_chunk_bytes = 150_000
    assert await push(small) == ["0-149999", "150000-299999", "300000-349999"]


@runs()
async def test_wrong_bytes_are_not_sent_to_the_end(small: SmallRegistry) -> None:
    with pytest.raises(DigestMismatch, match="other bytes"):
        await push(small, digest=digest_of(b"another"))
    assert spans(small) == SPANS[:3]
    assert small.count("PUT .*") == 0


# ---- where uploads go ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(str(tmp_path_factory.mktemp("tls")))


@runs()
async def test_uploads_to_another_server_take_no_password_along(tmp_path: Any) -> None:
    registry, elsewhere = SmallRegistry(auth="basic"), SmallRegistry()
    with registry.serve(), elsewhere.serve():
        path = str(tmp_path / "auth.json")
        write_auth_file(path, {registry.host: ("me", "pass/word")})
        registry.upload_url = elsewhere.url
        elsewhere.uploads["1"] = bytearray()
        elsewhere.cuts = [7]
        async with Registry(options=options(path)) as client:
            blob = Descriptor(media_type="text/plain", digest=digest_of(DATA), size=len(DATA))
            reference = parse_reference(f"oci://{registry.host}/a")
            await client.push_blob(reference, blob, uploads.from_memory(DATA))
    assert elsewhere.blobs[blob.digest] == DATA
    assert {each.authorization for each in elsewhere.seen} == {""}
    assert {each.method for each in elsewhere.seen} == {"PATCH", "GET", "PUT"}
    assert registry.seen[-1].authorization.startswith("Basic")


@runs()
async def test_a_registry_behind_a_proxy_that_it_does_not_know_of(certificates: Certificates) -> None:
    """It says http:// where it is reached by https://."""
    small = SmallRegistry()
    with small.serve(certificates.server_context()):
        small.upload_url = small.url.replace("https:", "http:")
        assert await push(small, options=options(ca_file=certificates.ca)) == SPANS


@pytest.mark.parametrize(
    ("location", "match"),
    [
        ("http://elsewhere.example", "not encrypted"),
        ("ftp://elsewhere.example", "not HTTP"),
        ("http://[::1", "invalid URL"),
    ],
)
@runs()
async def test_uploads_that_go_nowhere(location: str, match: str, certificates: Certificates) -> None:
    small = SmallRegistry()
    with small.serve(certificates.server_context()):
        small.upload_url = location
        with pytest.raises(StorageError, match=match) as caught:
            await push(small, options=options(ca_file=certificates.ca))
    assert "cret" not in str(caught.value)
