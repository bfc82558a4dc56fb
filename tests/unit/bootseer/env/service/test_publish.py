"""The line about a stored environment says which starts fetch it."""

from __future__ import annotations

from bootseer.env.service.publish import readers_of


def test_which_starts_fetch_it() -> None:
    assert (
        readers_of(["/a", "/b"], is_on_top=False)
        == "other nodes fetch it if /a, /b is there as it was before set-up"
    )
    assert readers_of(["/a"], is_on_top=True).startswith(
        "only nodes with the previous environment in /a fetch it; "
    )
