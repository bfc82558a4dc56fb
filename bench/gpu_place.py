"""The Python of bench/gpu.sh on a machine with a GPU and no network, and the wheels that it takes along.

`wheels [VERSION]`: what a machine that has torch may lack, for this version of Python, into out/wheels. `make`:
prints the interpreter to be used: one that has all, else an environment in out/gpu-venv over one that has torch,
with the wheels and this folder in it. In: PYTHON, interpreters by name. Standard library only, as nothing else is
there yet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from typing import Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WHEELS = os.path.join(ROOT, "out", "wheels")
VENV = os.path.join(ROOT, "out", "gpu-venv")
MIN_PYTHON = (3, 11)
MAX_BYTES = 48 << 20  # of all wheels: with this folder less than 64 MiB
NEWEST_GLIBC = 39  # 2.N; pip takes no wheel for an older one by itself
# Versions as in pyproject.toml. What comes with torch and transformers is not taken along.
PACKAGES = (
    *(
        "msgspec>=0.19",
        "typer>=0.15,<0.29",
        "shellingham",
        "zstandard>=0.23",
        "lz4>=4.3",
        "blake3>=1.0",
        "crc32c>=2.7",
    ),
    *("cryptography>=43", "cffi", "pycparser", "urllib3>=2.3", "safetensors>=0.5", "runai-model-streamer>=0.17"),
    *(
        "humanize",
        "pytest>=8.4",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.7",
        "execnet",
        "pluggy",
        "iniconfig",
        "hypothesis>=6.100",
        "sortedcontainers",
    ),
)
# What has to be there for all sections, as modules.
NEEDED = (
    *("torch", "msgspec", "typer", "zstandard", "lz4", "blake3", "crc32c", "cryptography", "safetensors"),
    *("urllib3", "pytest", "pytest_timeout", "hypothesis"),
)
ASK = """
import importlib.util, json, os, site, sys, sysconfig
names = sys.argv[1:]
print(json.dumps({
    "python": sys.executable,
    "version": sys.version_info[:2],
    "missing": [name for name in names if importlib.util.find_spec(name) is None],
    "scripts": sysconfig.get_path("scripts"),
    "packages": [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))],
}))
"""
SCRIPT = """\
#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""
SCRIPTS = {
    "bootrun": ("launcher.__main__", "bootrun"),
    "bootseer": ("launcher.__main__", "bootseer"),
    "torchrun": ("torch.distributed.run", "main"),
}


def gather(version: str) -> int:
    """Downloads the wheels."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 16, -1)]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    given = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={version}", *platforms]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", *given, "-d", WHEELS]
    if subprocess.run([*command, *PACKAGES]).returncode:
        return 1
    sizes = [entry.stat().st_size for entry in os.scandir(WHEELS)]
    print(f"{len(sizes)} wheels for Python {version}, {sum(sizes) / 2**20:.0f} MiB: {os.path.relpath(WHEELS)}")
    if sum(sizes) > MAX_BYTES:
        print(f"more than {MAX_BYTES >> 20} MiB: too much to be taken along", file=sys.stderr)
        return 1
    return 0


def make() -> int:
    """Prints the interpreter. What is said to people goes to stderr."""
    found = [
        about for name in candidates() if (about := ask(name)) is not None and "torch" not in about["missing"]
    ]
    if not found:
        return fail(
            "no Python here has torch: name one that has it, as in PYTHON=/opt/torch/bin/python bench/gpu.sh"
        )
    for about in found:
        if not about["missing"] and all(os.access(f"{about['scripts']}/{name}", os.X_OK) for name in SCRIPTS):
            print(about["python"])
            return 0
    base = found[0]
    if tuple(base["version"]) < MIN_PYTHON:
        return fail(f"{base['python']} is older than Python 3.11: name another one with torch as PYTHON=...")
    return build(base)


def candidates() -> list[str]:
    """Interpreters by name, in the order in which they are asked, each once."""
    given = [os.environ["PYTHON"]] if os.environ.get("PYTHON") else []
    return list(
        dict.fromkeys([*given, os.path.join(ROOT, ".venv/bin/python"), "python3", "python", sys.executable])
    )


def ask(name: str) -> dict[str, Any] | None:
    """What an interpreter says of itself; None for none."""
    try:
        told = subprocess.run(
            [name, "-c", ASK, *NEEDED], capture_output=True, text=True, timeout=60, check=True, cwd="/"
        )
        about: dict[str, Any] = json.loads(told.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return about


def build(base: dict[str, Any]) -> int:
    """An environment over that of `base`: its own packages come first."""
    shutil.rmtree(VENV, ignore_errors=True)
    subprocess.run([base["python"], "-m", "venv", "--without-pip", VENV], check=True, stdout=sys.stderr)
    python = os.path.join(VENV, "bin", "python")
    about = ask(python)
    if about is None:
        return fail(f"{python} does not run")
    own = about["packages"][0]
    wheels = [os.path.join(WHEELS, name) for name in sorted(os.listdir(WHEELS))] if os.path.isdir(WHEELS) else []
    for wheel in wheels:
        install(wheel, own)
    with open(os.path.join(own, "bench-gpu.pth"), "w", encoding="utf-8") as file:
        file.writelines(f"import site; site.addsitedir({path!r})\n" for path in base["packages"])
        file.write(ROOT + "\n")
    write_metadata(own)
    for name, (module, function) in SCRIPTS.items():
        path = os.path.join(VENV, "bin", name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(SCRIPT.format(python=python, module=module, function=function))
        os.chmod(path, 0o755)
    about = ask(python)
    if about is None or "torch" in about["missing"]:
        return fail(f"{python} does not find torch")
    if about["missing"]:
        missing = ", ".join(about["missing"])
        print(f"warning: what needs these will fail: {missing} (bench/gpu.sh wheels brings them)", file=sys.stderr)
    print(python)
    return 0


def install(wheel: str, directory: str) -> None:
    """Unpacks a wheel, as pip would, without the programs that come with it: not everywhere is a pip."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            parts = member.filename.split("/")
            if parts[0].endswith(".data"):
                if parts[1] not in ("purelib", "platlib"):
                    continue
                member.filename = "/".join(parts[2:])
            archive.extract(member, directory)


def write_metadata(directory: str) -> None:
    """What an installation of this folder would have said of itself."""
    with open(os.path.join(ROOT, "pyproject.toml"), encoding="utf-8") as file:
        text = file.read()
    version = re.search(r'^version = "(.+)"', text, re.MULTILINE)
    number = version.group(1) if version else "0"
    path = os.path.join(directory, f"bootseer-{number}.dist-info")
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "METADATA"), "w", encoding="utf-8") as file:
        file.write(f"Metadata-Version: 2.1\nName: bootseer\nVersion: {number}\n")


def fail(why: str) -> int:
    print(f"bench/gpu.sh: error: {why}", file=sys.stderr)
    return 1


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    if argv[:1] == ["wheels"] and len(argv) <= 2:
        return gather(argv[1] if len(argv) == 2 else "3.12")
    if argv == ["make"]:
        return make()
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
