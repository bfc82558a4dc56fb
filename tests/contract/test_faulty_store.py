"""A FaultyStore without faults is a store as any other."""

from __future__ import annotations

import itertools

import pytest

from bootseer.storage import open_store
from tests.testing.faulty_store import FaultyStore
from tests.testing.store_suite import MakeStore, StoreSuite

numbers = itertools.count()


class TestFaultyStore(StoreSuite):
    has_directories = False

    @pytest.fixture
    def make_store(self) -> MakeStore:
        name = f"memory://faulty{next(numbers)}/root"
        return lambda: FaultyStore(open_store(name))
