"""An fsspec file system with a loop of its own, whose files appear in one step: what s3fs and gcsfs are like."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem


class AsyncFiles(AsyncFileSystem):  # type: ignore[misc]
    """Files of this machine."""

    protocol = "asyncfiles"
    root_marker = "/"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._local = LocalFileSystem(auto_mkdir=True)

    async def _cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        await asyncio.sleep(0)
        return self._local.cat_file(self._strip_protocol(path), start, end)  # type: ignore[no-any-return]

    async def _info(self, path: str, **options: Any) -> dict[str, Any]:
        return self._local.info(self._strip_protocol(path))  # type: ignore[no-any-return]

    async def _ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._local.ls(self._strip_protocol(path), detail=detail)

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)
        aside = f"/tmp/asyncfiles-{uuid.uuid4().hex}"
        self._local.pipe_file(aside, value)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.replace(aside, path)

    async def _rm(self, path: Any, recursive: bool = False, **options: Any) -> None:
        self._local.rm(self._strip_protocol(path), recursive=recursive)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._local.makedirs(self._strip_protocol(path), exist_ok=exist_ok)

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **options: Any) -> Any:
        return self._local.open(self._strip_protocol(path), mode, autocommit=autocommit)
