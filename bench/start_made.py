"""What `bench start` keeps between runs: an image, an environment's wheels, a checkpoint, and our forms of them.

FOLDER/root              a Debian by debootstrap, with Python, pip and what builds extensions
       data/layers       gzip layers of the root, and the same as zstd frames (layers-zstd)
       data/wheels       the environment's wheels, and a page that names them, for pip and uv
       data/ckpt/plain   the checkpoint as one file of safetensors; data/ckpt/striped: the same, written by us
       data/image/tree   our tree of the root
       keys              a key of this bench alone
       made.json         of what, and by which code: another one makes all of it anew
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import bootseer.checkpoint
import bootseer.storage
import bootseer.tree
from bench import image_ways
from bench.ckpt_run import BOOTSEER, ROOT, make_environ
from bench.env_kept import source_digest
from bench.env_packages import clean_environ
from bench.image_layers import MANIFEST, make_layers
from bench.image_tree import regular_files
from bench.record import BenchError, note

MIRROR = "http://deb.debian.org/debian"
PROGRAMS = ("python3", "python3-venv", "python3-pip", "python3-dev", "build-essential", "git", "curl", "procps")
# What language models are trained with, and what that needs. As most scripts, ours imports some of it.
WANTED = (
    *("torch==2.13.0", "numpy", "scipy", "pandas", "pyarrow", "scikit-learn", "matplotlib", "transformers"),
    *("safetensors", "pyyaml", "tqdm", "regex", "einops", "requests", "psutil"),
)
PYTHON = "/usr/bin/python3"  # of the image
LOCK = "requirements.txt"
INDEX = "wheels/index.html"
_LAYOUT = 1  # of what is made here; another number makes it anew
_INSTALL_S = 3600.0


class Made(NamedTuple):
    """Paths and sizes."""

    root: str
    data: str
    keys: str
    lock: str  # pins every package
    packages: list[str]  # NAME==VERSION
    facts: dict[str, float]  # bytes and files, for people


def prepare(directory: str) -> Made:
    """Makes what is not there yet. Raises: BenchError."""
    data, keys, root = (os.path.join(directory, name) for name in ("data", "keys", "root"))
    stamp_path = os.path.join(directory, "made.json")
    stamp = {
        "layout": _LAYOUT,
        "programs": list(PROGRAMS),
        "wanted": list(WANTED),
        "code": source_digest(bootseer.checkpoint, bootseer.tree, bootseer.storage),
    }
    lock = os.path.join(data, LOCK)
    if _read(stamp_path) != stamp:
        if os.path.exists(stamp_path):
            os.remove(stamp_path)  # what an interrupted run leaves is not taken for whole
        for path in (data, keys):
            shutil.rmtree(path, ignore_errors=True)
        os.makedirs(data)
        _make_root(root)
        _get_wheels(root, os.path.join(data, "wheels"), lock)
        make_layers(root, os.path.join(data, "layers"))
        _pack_by_zstd(os.path.join(data, "layers"), os.path.join(data, "layers-zstd"))
        note("building our tree of the image")
        os.makedirs(os.path.join(data, "image"))
        image_ways.build(root, os.path.join(data, "image"), keys)
        _make_checkpoint(os.path.join(data, "ckpt"))
        with open(stamp_path, "w", encoding="utf-8") as file:
            json.dump(stamp, file)
    with open(lock, encoding="utf-8") as file:
        packages = file.read().split()
    return Made(root, data, keys, lock, packages, _describe(root, data))


def _describe(root: str, data: str) -> dict[str, float]:
    paths = regular_files(root)

    def size(*names: str) -> float:
        return float(sum(map(os.path.getsize, regular_files(os.path.join(data, *names)))))

    return {
        "image_bytes": float(sum(map(os.path.getsize, paths))),
        "image_files": float(len(paths)),
        "layers_bytes": size("layers"),
        "layers_zstd_bytes": size("layers-zstd"),
        "tree_bytes": size("image"),
        "wheels_bytes": size("wheels"),
        "checkpoint_bytes": size("ckpt", "plain"),
    }


def _make_root(root: str) -> None:
    """Raises: BenchError without debootstrap, or a mirror of Debian."""
    if os.path.exists(os.path.join(root, PYTHON.lstrip("/"))):
        return
    if shutil.which("debootstrap") is None:
        raise BenchError("not installed here: debootstrap")
    note("making a Debian by debootstrap")
    shutil.rmtree(root, ignore_errors=True)
    made = root + ".new"
    shutil.rmtree(made, ignore_errors=True)
    with open("/etc/os-release", encoding="utf-8") as file:
        found = re.search(r"^VERSION_CODENAME=(\w+)$", file.read(), re.MULTILINE)
    codename = found[1] if found else "stable"
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(PROGRAMS)}", codename, made, MIRROR]
    ran = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_INSTALL_S)
    if ran.returncode:
        raise BenchError(f"debootstrap failed:\n{ran.stdout[-3000:]}")
    uv = shutil.which("uv", path=os.path.dirname(sys.executable)) or shutil.which("uv")
    if uv is None:
        raise BenchError("not installed here: uv")
    shutil.copy2(uv, os.path.join(made, "usr/local/bin/uv"))  # for `tuned`, which asks nobody for it
    for path in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(os.path.join(made, path), ignore_errors=True)
    os.rename(made, root)


def _get_wheels(root: str, directory: str, lock: str) -> None:
    """For the image's Python, by this one's pip; with a page that names them."""
    note(f"downloading the wheels of {len(WANTED)} packages and what they need")
    version = _version_of(root)
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", directory]
    argv += ["--python-version", version, "--implementation", "cp", *WANTED]
    ran = subprocess.run(argv, env=make_environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode:
        raise BenchError(f"pip cannot download the wheels of the environment:\n{ran.stderr[-2000:]}")
    from packaging.utils import parse_wheel_filename

    names = sorted(name for name in os.listdir(directory) if name.endswith(".whl"))
    with open(lock, "w", encoding="utf-8") as file:
        file.writelines("{}=={}\n".format(*parse_wheel_filename(name)[:2]) for name in names)
    rows = "".join(f'<a href="{html.escape(name)}">{html.escape(name)}</a><br>\n' for name in names)
    with open(os.path.join(directory, "index.html"), "w", encoding="utf-8") as file:
        file.write(f"<!DOCTYPE html><html><body>\n{rows}</body></html>\n")


def _version_of(root: str) -> str:
    ran = subprocess.run(
        ["chroot", root, PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        env=clean_environ(),
    )
    if ran.returncode:
        raise BenchError(f"the image's Python does not run:\n{ran.stderr[-2000:]}")
    return ran.stdout.strip()


def _pack_by_zstd(layers: str, directory: str) -> None:
    """The same layers, as nydus, estargz and buildkit's zstd have them; what is pulled by `tuned`."""
    note("making zstd layers")
    os.makedirs(directory)
    with open(os.path.join(layers, MANIFEST), encoding="utf-8") as file:
        names = [each[0] for each in json.load(file)]
    sizes = {}
    for name in names:
        target = os.path.join(directory, name.replace(".gz", ".zst"))
        subprocess.run(
            ["bash", "-c", 'gzip -dc "$0" | zstd -q -3 -T0 -o "$1"', os.path.join(layers, name), target],
            check=True,
        )
        sizes[os.path.basename(target)] = os.path.getsize(target)
    with open(os.path.join(directory, MANIFEST), "w", encoding="utf-8") as file:
        json.dump(sizes, file)


def _make_checkpoint(directory: str) -> None:
    """What start_train.py loads: the frozen backbone."""
    note("making the checkpoint")
    plain = os.path.join(directory, "plain", "step-100")
    os.makedirs(plain)
    code = """
import ast, re, sys, torch
from safetensors.torch import save_file
torch.manual_seed(0)
with open(sys.argv[2]) as file:
    CONFIG = ast.literal_eval(re.search("^CONFIG = (.*)$", file.read(), re.M)[1])
width = CONFIG["width"]
state = {"words.weight": torch.randn(CONFIG["vocabulary"], width) * 0.02}
for number in range(CONFIG["layers"]):
    state[f"blocks.{number}.mixed.base.weight"] = torch.randn(3 * width, width) * 0.02
    state[f"blocks.{number}.out.base.weight"] = torch.randn(width, width) * 0.02
save_file(state, sys.argv[1] + "/model.safetensors")
"""
    commands = [
        [sys.executable, "-c", code, plain, os.path.join(ROOT, "bench", "start_train.py")],
        [BOOTSEER, "ckpt", "stripe", os.path.dirname(plain), os.path.join(directory, "striped")],
    ]
    for argv in commands:
        ran = subprocess.run(argv, env=make_environ(), capture_output=True, text=True, timeout=_INSTALL_S)
        if ran.returncode:
            raise BenchError(f"the checkpoint could not be made:\n{ran.stderr[-3000:]}")


def _read(path: str) -> object:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None
