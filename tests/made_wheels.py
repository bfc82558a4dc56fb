"""Tiny wheels for tests, made on the fly: pip and uv install them by `--no-index --find-links`."""

from __future__ import annotations

import base64
import hashlib
import os
import zipfile
from collections.abc import Mapping, Sequence

_TIME = (2024, 1, 2, 3, 4, 6)


def make_wheel(
    directory: str | os.PathLike[str],
    name: str,
    version: str,
    *,
    requires: Sequence[str] = (),
    files: Mapping[str, str | bytes] | None = None,
    scripts: Mapping[str, str] | None = None,
) -> str:
    """Writes NAME-VERSION-py3-none-any.whl into the folder; gives its path.

    Args: requires: lines of Requires-Dist. files: further files by path in site-packages, or other content for the
    package's own `NAME/__init__.py`. scripts: console scripts, `package.module:function` by name.
    """
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    content: dict[str, str | bytes] = {
        f"{module}/__init__.py": f"VERSION = {version!r}\n\n\ndef main():\n    print(VERSION)\n"
    }
    content |= files or {}
    content[f"{info}/METADATA"] = "\n".join(metadata) + "\n"
    content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    if scripts:
        lines = "".join(f"{script} = {target}\n" for script, target in scripts.items())
        content[f"{info}/entry_points.txt"] = f"[console_scripts]\n{lines}"
    path = os.path.join(directory, f"{module}-{version}-py3-none-any.whl")
    os.makedirs(directory, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        record = []
        for each, text in content.items():
            data = text.encode() if isinstance(text, str) else text
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{each},sha256={digest},{len(data)}\n")
            _write(wheel, each, data)
        _write(wheel, f"{info}/RECORD", "".join([*record, f"{info}/RECORD,,\n"]).encode())
    return path


def _write(wheel: zipfile.ZipFile, path: str, data: bytes) -> None:
    info = zipfile.ZipInfo(path, _TIME)
    info.external_attr = 0o644 << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    wheel.writestr(info, data)
