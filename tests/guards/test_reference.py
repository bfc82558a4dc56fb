"""The generated pages of docs/reference are what the tables of flags and settings give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.guards import reference


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_a_generated_page_is_up_to_date(name: str) -> None:
    text = Path(reference.DIRECTORY, name).read_text(encoding="utf-8")
    assert text == reference.PAGES[name](), "`python -m tests.guards.reference` writes them"
