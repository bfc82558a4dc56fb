"""Names of images and artefacts: Docker's short ones, URLs, what cannot be, and that no password is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError
from bootseer.storage.oci.reference import Reference, parse_reference, parse_registry, referrers_tag

HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"

labels = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9-]{0,8}[A-Za-z0-9])?", fullmatch=True)
hosts = st.one_of(
    st.lists(labels, min_size=1, max_size=4).map(".".join),
    st.just("[::1]"),
    st.just("[2001:db8::10]"),
    st.just("127.0.0.1"),
)
registries = st.one_of(hosts, st.tuples(hosts, st.integers(1, 65535)).map(lambda pair: f"{pair[0]}:{pair[1]}"))
components = st.from_regex(r"[a-z0-9]{1,6}((\.|_|__|-{1,3})[a-z0-9]{1,6}){0,2}", fullmatch=True)
repositories = st.lists(components, min_size=1, max_size=4).map("/".join)
tags = st.one_of(st.just(""), st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True))
digests = st.one_of(st.just(""), st.text("0123456789abcdef", min_size=64, max_size=64).map("sha256:{}".format))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ubuntu", ("docker.io", "library/ubuntu", "", "")),
        ("ubuntu:22.04", ("docker.io", "library/ubuntu", "22.04", "")),
        ("docker://ubuntu:22.04", ("docker.io", "library/ubuntu", "22.04", "")),
        ("pytorch/pytorch", ("docker.io", "pytorch/pytorch", "", "")),
        ("docker.io/ubuntu", ("docker.io", "library/ubuntu", "", "")),
        ("oci://docker.io/ubuntu", ("docker.io", "library/ubuntu", "", "")),
        ("index.docker.io/library/ubuntu", ("docker.io", "library/ubuntu", "", "")),
        ("localhost/a", ("localhost", "a", "", "")),
        ("localhost:5000/a:b", ("localhost:5000", "a", "b", "")),
        ("REGISTRY/a", ("registry", "a", "", "")),
        ("registry:5000/a", ("registry:5000", "a", "", "")),
        ("registry/a", ("docker.io", "registry/a", "", "")),
        ("oci://registry/a", ("registry", "a", "", "")),
        ("oci://GHCR.io/org/repo/deep:v1/", ("ghcr.io", "org/repo/deep", "v1", "")),
        (f"quay.io/a/b@{DIGEST}", ("quay.io", "a/b", "", DIGEST)),
        (f"quay.io/a/b:t@{DIGEST}", ("quay.io", "a/b", "t", DIGEST)),
        ("oci://[::1]:5000/a:b", ("[::1]:5000", "a", "b", "")),
    ],
)
def test_what_names_mean(text: str, expected: tuple[str, str, str, str]) -> None:
    assert parse_reference(text) == expected


@given(registries, repositories, tags, digests)
def test_what_is_written_is_read_again(registry: str, repository: str, tag: str, digest: str) -> None:
    text = f"oci://{registry}/{repository}" + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
    reference = parse_reference(text)
    assert reference == Reference(registry.lower(), repository, tag, digest)
    assert parse_reference(str(reference)) == reference
    assert reference.version == (digest or tag or "latest")
    assert "//" not in reference.name
    assert reference.at(DIGEST).version == DIGEST


@given(st.text(max_size=80))
def test_any_text_is_a_reference_or_one_error(text: str) -> None:
    try:
        reference = parse_reference(text)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert parse_reference(str(reference)) == reference
    for part in reference:
        # They stand in URLs as they are.
        assert not set(part) & set("?#%\\ @\n\0")
    assert ".." not in reference.repository.split("/")


@pytest.mark.parametrize(
    "text",
    [
        "", "/", "oci://", "oci://registry", "oci://registry/", "oci:///a", "oci://registry//a", "oci://registry/A",
        "oci://registry/a:", "oci://registry/a:-x", "oci://registry/../a", "oci://registry/a/..",
        "oci://registry/a b", "oci://registry/a?x=1", "oci://registry/a#x", "oci://reg istry/a", "oci://registry:0/a",
        "oci://registry:65536/a", "oci://registry:x/a", "oci://-registry/a", "oci://registry/a@sha256:12",
        "oci://registry/a@md5:12", "https://registry/a", "oci://registry/a%2fb", "oci://registry/" + "a" * 256,
        "oci://registry/a:" + "t" * 129, "oci://registry/a_", "oci://reg/a/b:c:d",
        "a//b", "A/b/",
    ],
)  # fmt: skip
def test_what_no_registry_takes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_reference(text)


@pytest.mark.parametrize(
    "text", ["oci://me:secret@registry/a:b", "docker://me:secret@registry.example/a", "me:secret@registry/a"]
)
def test_passwords_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="no password belongs in a name") as caught:
        parse_reference(text)
    assert "secret" not in str(caught.value)


def test_docker_hub_is_asked_elsewhere() -> None:
    reference = parse_reference("ubuntu")
    assert (reference.host, reference.name) == ("registry-1.docker.io", "docker.io/library/ubuntu")
    assert parse_reference("oci://ghcr.io/a").host == "ghcr.io"
    assert parse_registry("registry-1.docker.io") == "docker.io"


def test_the_tag_that_stands_in_for_referrers() -> None:
    assert referrers_tag(DIGEST) == f"sha256-{HEX}"
