"""Which answers of services are valid: whole ones, and those of unknown kinds."""

from __future__ import annotations

from typing import Any

import pytest

from bootseer.ipc.framing import InvalidMessageError
from launcher.provision.answers import check_caches, check_environment, check_image
from launcher.provision.failed_mounts import ServedMount

READY_ENVIRONMENT = {
    "did": "ready",
    "how": "mount",
    "key": "k",
    "tree": "t",
    "prefix": ["p"],
    "mount": ["/journal", "/control"],
    "targets": ["/t"],
    "imports": [],
    "python": "",
    "setup_s": 0.0,
    "capture_s": 1,
    "is_publishing": False,
}
READY_IMAGE = {
    "did": "ready",
    "prefix": [],
    "program": "/p",
    "set": {"A": "b"},
    "unset": ["C"],
    "digest": "d",
    "lock": "",
    "how": "mounted",
    "mount": [],
    "source_s": 0.1,
    "root_s": 2,
    "notes": ["n"],
}
SEEDED = {"did": "seeded", "line": "l", "files": 1, "bytes": 2, "is_cold": True, "is_lost": False, "notes": []}
CHECKS = {"environment": check_environment, "image": check_image, "caches": check_caches}


@pytest.mark.parametrize(
    ("service", "answer"),
    [
        ("environment", READY_ENVIRONMENT),
        ("environment", {"did": "looked", "key": "", "tree": "", "why": "", "is_silent": False}),
        ("environment", {"did": "failed", "why": "w", "tail": ["line"]}),
        ("environment", {"did": "origin", "url": "u", "folders": ["f"]}),
        ("image", READY_IMAGE),
        ("image", {"did": "shown", "number": 1, "missing": []}),
        ("image", {"did": "statistics", "found": {"ready_s": 0.5}}),
        ("caches", SEEDED),
        ("caches", {**SEEDED, "did": "opened", "folder": "/f", "variables": {"A": "b"}}),
        ("caches", {"did": "failed", "why": "w", "ends_job": True}),
    ],
)
def test_each_field_is_needed_and_has_its_type(service: str, answer: dict[str, Any]) -> None:
    check = CHECKS[service]
    check(answer)
    check({**answer, "another": 1})
    for name in answer.keys() - {"is_silent"}:
        for wrong in (None, [3], {"a": None}):
            with pytest.raises(InvalidMessageError):
                check({**answer, name: wrong})
    for name in answer.keys() - {"is_silent", "mount", "ends_job"}:
        with pytest.raises(InvalidMessageError):
            check({each: value for each, value in answer.items() if each != name})


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1 << 70, True, "3"])
def test_numbers_are_finite(number: object) -> None:
    with pytest.raises(InvalidMessageError):
        check_environment({**READY_ENVIRONMENT, "setup_s": number})
    with pytest.raises(InvalidMessageError):
        check_caches({**SEEDED, "files": number})


@pytest.mark.parametrize("check", CHECKS.values())
def test_unknown_kinds_pass(check: Any) -> None:
    check({"did": "invented", "why": 3})
    for answer in ({}, {"did": 3}, {"did": "invented", "notes": 3}):
        with pytest.raises(InvalidMessageError):
            check(answer)


def test_a_mount_has_at_most_the_paths_that_are_known() -> None:
    paths = ["p"] * len(ServedMount._fields)
    check_image({**READY_IMAGE, "mount": paths})
    with pytest.raises(InvalidMessageError):
        check_image({**READY_IMAGE, "mount": [*paths, "p"]})
