"""PURE: the texts of the status folder, from the daemon's answer to `status`.

In: that answer (answers.py). Out: files by name. Any user can read them, so they name no process
and no password. docs/guide/images.md describes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from bootseer.storage.paths import redact

NAMES = ("state", "fetched_ratio", "bytes", "stalls", "source", "status.json")
MAX_ERROR_CHARACTERS = 600
_URL = re.compile(r"\b[A-Za-z][A-Za-z0-9+.\-]*://[^\s\"'<>]+")
_AT_WORK = ("new", "hot", "cold")  # phases of a prefetcher


def render(status: Mapping[str, Any], time_s: float) -> dict[str, bytes]:
    """Return the texts. Args: time_s: of this moment, Unix."""
    facts = summarize(status)
    ratio, moved, stalls, source = (facts[name] for name in ("fetched_ratio", "bytes", "stalls", "source"))
    texts = {
        "state": "\n".join(filter(None, (facts["state"], facts["error"]))),
        "fetched_ratio": f"{ratio:.4f}",
        "bytes": "\n".join(f"{name} {count}" for name, count in moved.items()),
        "stalls": f"count {stalls['count']}\nseconds {stalls['seconds']:.3f}",
        "source": f"url {source['url']}\ndigest sha256:{source['digest']}",
        "status.json": json.dumps({**facts, "time_s": round(time_s, 3)}, indent=1),
    }
    return {name: texts[name].encode("utf-8", "replace") + b"\n" for name in NAMES}


def summarize(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of status.json but for the time."""
    blocks: Mapping[str, Any] = status.get("blocks") or {}
    device: Mapping[str, Any] = status.get("device") or {}
    failing: Mapping[str, Any] = status.get("failing") or {}
    count, present = int(blocks.get("count", 0)), int((status.get("cache") or {}).get("present", 0))
    error = hide_secrets(str(failing.get("error", "")))
    is_fetching = bool(device.get("waiting")) or any(
        each.get("phase") in _AT_WORK for each in (status.get("prefetch") or {}).values()
    )
    if failing.get("blocks"):
        state = "failing"
    elif present >= count:
        state = "complete"
    else:
        state = "fetching" if is_fetching else "mounted"
    return {
        "state": state,
        "error": error if state == "failing" else "",
        # Rounded down: 1 means that all blocks are there.
        "fetched_ratio": 1.0 if present >= count else int(present / count * 10_000) / 10_000,
        "blocks": {"count": count, "present": present, "failing": int(failing.get("blocks", 0))},
        "bytes": {
            "store": int(blocks.get("store_bytes", blocks.get("read_bytes", 0))),
            "peer": int(blocks.get("peer_bytes", 0)),
            "cache": int(device.get("bytes", 0)) - int(device.get("late_bytes", 0)),
        },
        "stalls": {"count": int(blocks.get("waits", 0)), "seconds": round(float(blocks.get("blocked_s", 0.0)), 3)},
        "source": {"url": hide_secrets(str(status.get("url", ""))), "digest": str(status.get("digest", ""))},
        "uptime_s": round(float(status.get("uptime_s", 0.0)), 3),
    }


def hide_secrets(text: str) -> str:
    """Return one line without passwords and values of queries in URLs."""
    return _URL.sub(lambda found: redact(found[0]), " ".join(text.split()))[:MAX_ERROR_CHARACTERS]
