"""Options and environment of registries: mirrors, plain HTTP, files; what holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from bootseer.errors import ConfigError
from bootseer.storage.oci.options import is_loopback, origin_of, places_of, read_options
from bootseer.storage.oci.reference import parse_reference

HOME = {"HOME": "/home/me"}


def test_nothing_is_said() -> None:
    options = read_options(environ=HOME)
    assert options.mirrors == ()
    assert options.plain_http == frozenset()
    assert options.ca_file == ""
    assert options.auth_files == ("/home/me/.config/containers/auth.json", "/home/me/.docker/config.json")
    assert options.certs_folders == (
        "/home/me/.config/containers/certs.d", "/etc/containers/certs.d", "/etc/docker/certs.d",
    )  # fmt: skip


def test_the_environment() -> None:
    environ = {
        **HOME,
        "BOOTSEER_REGISTRY_MIRRORS": "docker.io=Mirror.example:5000, ghcr.io/org=m2/ghcr ,docker.io=m3",
        "BOOTSEER_REGISTRY_PLAIN_HTTP": "m3,registry:5000",
        "BOOTSEER_REGISTRY_CA": "/ca.pem",
        "DOCKER_CONFIG": "/docker",
        "XDG_RUNTIME_DIR": "/run/user/7",
    }
    options = read_options(environ=environ)
    assert options.mirrors == (
        ("docker.io", "mirror.example:5000"),
        ("ghcr.io/org", "m2/ghcr"),
        ("docker.io", "m3"),
    )
    assert options.plain_http == {"m3", "registry:5000"}
    assert options.ca_file == "/ca.pem"
    assert options.auth_files == (
        "/run/user/7/containers/auth.json", "/home/me/.config/containers/auth.json", "/docker/config.json",
    )  # fmt: skip
    assert read_options(environ={**environ, "REGISTRY_AUTH_FILE": "/auth"}).auth_files == ("/auth",)


def test_options_hold_against_the_environment() -> None:
    environ = {
        "BOOTSEER_REGISTRY_MIRRORS": "docker.io=x",
        "BOOTSEER_REGISTRY_PLAIN_HTTP": "x",
        "BOOTSEER_REGISTRY_CA": "/x",
        "REGISTRY_AUTH_FILE": "/x",
    }
    options = read_options(
        {
            "mirrors": {"docker.io": ["a", "b/c"], "quay.io": "d"},
            "plain_http": ["h:1"],
            "ca_file": "/ca",
            "auth_file": "/auth",
            "certs_folders": ["/certs"],
        },
        environ=environ,
    )
    assert options.mirrors == (("docker.io", "a"), ("docker.io", "b/c"), ("quay.io", "d"))
    assert options == (options.mirrors, {"h:1"}, "/ca", ("/auth",), ("/certs",))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mirror": "x"}, "unknown options mirror"),
        ({"mirrors": "docker.io"}, "PREFIX=MIRROR"),
        ({"mirrors": "docker.io=a b"}, "not a registry"),
        ({"mirrors": "docker.io=https://a"}, "not a registry"),
        ({"mirrors": "docker.io/../x=a"}, "not a repository"),
        ({"mirrors": 7}, "mirrors"),
        ({"plain_http": True}, "plain_http"),
        ({"plain_http": "a/b"}, "not a registry"),
        ({"ca_file": 7}, "ca_file"),
        ({"auth_file": None}, "auth_file"),
        ({"certs_folders": 7}, "certs_folders"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read_options(options, environ=HOME)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("ubuntu", ["a/library/ubuntu", "b:5/hub/library/ubuntu", "registry-1.docker.io/library/ubuntu"]),
        ("docker.io/org/x", ["c/org/x", "registry-1.docker.io/org/x"]),
        ("docker.io/organic/x", ["a/organic/x", "b:5/hub/organic/x", "registry-1.docker.io/organic/x"]),
        ("quay.io/team/one", ["d/one", "quay.io/team/one"]),
        ("quay.io/team/one/two", ["d/one/two", "quay.io/team/one/two"]),
        ("quay.io/other/one", ["quay.io/other/one"]),
        ("ghcr.io/a/b", ["registry-1.docker.io/cached/a/b", "ghcr.io/a/b"]),
    ],
)
def test_mirrors_come_first_and_the_longest_prefix_counts(name: str, places: list[str]) -> None:
    mirrors = "docker.io=a,docker.io=b:5/hub,docker.io/org=c/org,quay.io/team=d,ghcr.io=docker.io/cached"
    found = places_of(parse_reference(name), read_options({"mirrors": mirrors}, environ=HOME))
    assert [f"{place.host}/{place.repository}" for place in found] == places
    assert [place.is_mirror for place in found] == [True] * (len(places) - 1) + [False]
    assert found[-1] == origin_of(parse_reference(name))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("localhost:5000", True), ("a.localhost", True), ("127.0.0.1:80", True),
        ("127.1.2.3", True), ("[::1]", True), ("[::1]:5000", True), ("127.0.0.1.example", False),
        ("1127.0.0.1", False), ("[::2]", False),
        ("localhost.example", False), ("10.0.0.1", False), ("127.0.0.256", False), ("example", False),
    ],
)  # fmt: skip
def test_what_is_this_machine(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected
