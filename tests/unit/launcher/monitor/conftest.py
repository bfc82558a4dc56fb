"""What tests of supervision share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher.base.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()
