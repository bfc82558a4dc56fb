"""A striped checkpoint of one file behind a web server that counts."""

from __future__ import annotations

import random
from pathlib import Path

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.storage.local.store import LocalStore
from tests.testing.faulty_http import FaultyHttpServer


class ServedCheckpoint:
    """Its newest version is `data`, under the name model.bin; `url` is of all versions."""

    def __init__(self, folder: Path, size: int, geometry: Geometry | None = None) -> None:
        self._directory, self._size, self._geometry = folder, size, geometry
        folder.mkdir()
        self.server = FaultyHttpServer({})
        self.url = f"{self.server.url}/ckpt"
        self.data = b""
        self.write(0)

    def write(self, seed: int) -> None:
        """Another version."""
        self.data = random.Random(seed).randbytes(self._size)
        store = LocalStore(str(self._directory))
        files = [("model.bin", MemoryInput([self.data]))]
        aio.run_sync(write_version(store, "ckpt", files, geometry=self._geometry))
        aio.close()
        for path in self._directory.rglob("*"):
            if path.is_file():
                self.server.files[path.relative_to(self._directory).as_posix()] = memoryview(path.read_bytes())

    @property
    def sent_bytes(self) -> int:
        """Of stripes."""
        return sum(count for name, count in self.server.served_bytes.items() if ".s0" in name)

    @property
    def copies(self) -> float:
        """The same, over the bytes of one version."""
        return self.sent_bytes / self._size
