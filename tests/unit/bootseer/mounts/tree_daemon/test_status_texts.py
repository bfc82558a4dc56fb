"""The texts of the status folder, from answers of a tree's daemon."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bootseer.mounts.tree_daemon.status_texts import MAX_ERROR_CHARACTERS, NAMES, hide_secrets, render

STATUS: dict[str, Any] = {
    "digest": "ab" * 32,
    "state": "ready",
    "root": "/run/bootseer/0/trees/x/root",
    "pid": 4711,
    "log": "/run/bootseer/0/logs/x.log",
    "leases": [{"pid": 4712, "uid": 1234, "held_s": 1.0}],
    "url": "https://ada:secret@store/tree",
    "uptime_s": 12.3456,
    "blocks": {"count": 8, "read_bytes": 1000, "waits": 3, "blocked_s": 0.25},
    "cache": {"present": 3},
    "device": {"bytes": 900, "late_bytes": 200, "waiting": 0},
    "prefetch": {},
    "failing": {"blocks": 0, "error": ""},
}


def texts(**changes: Any) -> dict[str, str]:
    found = render({**STATUS, **changes}, 1000.5)
    assert tuple(found) == NAMES
    return {name: text.decode() for name, text in found.items()}


def test_all_texts() -> None:
    found = texts()
    assert found["state"] == "mounted\n"
    assert found["fetched_ratio"] == "0.3750\n"
    assert found["bytes"] == "store 1000\npeer 0\ncache 700\n"
    assert found["stalls"] == "count 3\nseconds 0.250\n"
    assert found["source"] == f"url https://ada:***@store/tree\ndigest sha256:{'ab' * 32}\n"
    assert json.loads(found["status.json"]) == {
        "state": "mounted",
        "error": "",
        "fetched_ratio": 0.375,
        "blocks": {"count": 8, "present": 3, "failing": 0},
        "bytes": {"store": 1000, "peer": 0, "cache": 700},
        "stalls": {"count": 3, "seconds": 0.25},
        "source": {"url": "https://ada:***@store/tree", "digest": "ab" * 32},
        "uptime_s": 12.346,
        "time_s": 1000.5,
    }


def test_nothing_of_the_node_is_shown() -> None:
    shown = "".join(texts().values())
    for secret in ("secret", "4711", "4712", "1234", "/run/bootseer"):
        assert secret not in shown


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"device": {"waiting": 2}}, "fetching"),
        ({"prefetch": {"whole": {"phase": "cold"}}}, "fetching"),
        ({"prefetch": {"any": {"phase": "done"}, "whole": {"phase": "given_up"}}}, "mounted"),
        ({"cache": {"present": 8}, "prefetch": {"whole": {"phase": "cold"}}}, "complete"),
        ({"blocks": {"count": 0}, "cache": {"present": 0}}, "complete"),
        ({"failing": {"blocks": 1, "error": "block 5: gone"}, "device": {"waiting": 1}}, "failing\nblock 5: gone"),
        ({"failing": {"blocks": 1, "error": ""}}, "failing"),
        ({"failing": {"blocks": 0, "error": "of before"}}, "mounted"),
        ({"blocks": {}, "cache": None, "device": None, "prefetch": None, "failing": None}, "complete"),
    ],
)
def test_states(changes: dict[str, Any], state: str) -> None:
    assert texts(**changes)["state"] == f"{state}\n"


def test_bytes_of_peers() -> None:
    blocks = {"count": 8, "read_bytes": 1000, "store_bytes": 300, "peer_bytes": 700}
    assert texts(blocks=blocks)["bytes"] == "store 300\npeer 700\ncache 700\n"


def test_a_share_of_one_means_everything() -> None:
    blocks = {"count": 1_000_000}
    assert texts(blocks=blocks, cache={"present": 999_999})["fetched_ratio"] == "0.9999\n"
    assert texts(blocks=blocks, cache={"present": 1_000_000})["fetched_ratio"] == "1.0000\n"


def test_secrets_in_errors() -> None:
    error = "https://u:pw@h/t/packs/x?X-Sig=abc&e=1: block 3: 503\nfrom oci://user:word@r/i, 's3://key:sec@b/k'"
    shown = texts(failing={"blocks": 1, "error": error})["state"]
    assert shown.count("\n") == 2, "one line"
    for secret in ("pw", "abc", "word", "sec@"):
        assert secret not in shown
    assert "block 3: 503" in shown and "packs/x" in shown


def test_a_long_error_is_cut() -> None:
    assert len(hide_secrets("x" * 10_000)) == MAX_ERROR_CHARACTERS
