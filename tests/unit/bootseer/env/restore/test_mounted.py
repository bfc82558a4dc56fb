"""What a mounted environment says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bootseer.env.restore import mounted
from bootseer.errors import StorageError


def test_a_password_in_a_url_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox: Any = None
    tree = SimpleNamespace(unreadable=["block 3: timed out"], is_damaged=False)
    monkeypatch.setattr(mounted, "may_mount", lambda: True)
    monkeypatch.setattr(mounted, "TreeCheck", lambda *_: None)
    monkeypatch.setattr(mounted, "mount_tree", lambda *_, **__: tree)
    with pytest.raises(StorageError, match="block 3: timed out") as raised:
        mounted.mount_env("https://me:secret@host/tree", "0" * 64, ["/t"], sandbox)
    assert "secret" not in str(raised.value) and "host/tree" in str(raised.value)
