"""The packages of `bench env`: their wheels, downloaded once, and a file that pins them all.

What a training environment has: torch for CPUs, the libraries around it, what loads data and what logs. pip
resolves them once; from then on all ways install the same wheels, from this disk, and nobody asks a network.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from typing import NamedTuple

from packaging.utils import parse_wheel_filename

from bench.ckpt_run import make_environ
from bench.record import BenchError, note

IMPORTED = ("torch", "transformers")  # what is imported at the end of each way
WANTED = (
    *("torch==2.13.0", "transformers==5.23.0", "numpy", "datasets", "accelerate", "peft", "safetensors"),
    *("sentencepiece", "tiktoken", "einops", "scipy", "scikit-learn", "pandas", "pyarrow", "matplotlib", "numba"),
    *("opencv-python-headless", "tensorboard", "wandb", "fastapi", "grpcio", "aiohttp", "uvloop", "hydra-core"),
)
LOCK = "requirements.lock"
_CUDA = ("nvidia-", "cuda-")  # first letters of packages that a wheel of torch for GPUs asks for
_OWN_SETTINGS = ("PIP_", "UV_")


class Wheels(NamedTuple):
    """All that is installed."""

    folder: str
    lock: str  # path of the file that pins each
    names: list[str]  # NAME==VERSION, sorted
    size: int  # bytes of the wheels


def get_wheels(directory: str, given: str = "") -> Wheels:
    """The wheels in `given`, else those of WANTED, which are downloaded into `directory` if they are not there
    yet.

    Raises: BenchError when pip cannot have them, with what it said.
    """
    wheels = given or os.path.join(directory, "wheels")
    if not given:
        _download(wheels)
    paths = [entry for entry in os.scandir(wheels) if entry.name.endswith(".whl")]
    names = sorted("{}=={}".format(*parse_wheel_filename(entry.name)[:2]) for entry in paths)
    missing = sorted(set(IMPORTED) - {name.partition("==")[0] for name in names})
    if missing:
        raise BenchError(f"{wheels}: there is no wheel of {', '.join(missing)}, which is imported at the end")
    lock = os.path.join(directory, LOCK)
    with open(lock, "w", encoding="utf-8") as file:
        file.writelines(f"{name}\n" for name in names)
    return Wheels(wheels, lock, names, sum(entry.stat().st_size for entry in paths))


def clean_environ(**more: str) -> dict[str, str]:
    """The environment of all ways: without settings of pip and uv, which would change one of them."""
    found = {name: value for name, value in make_environ().items() if not name.startswith(_OWN_SETTINGS)}
    taken = {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "UV_NO_CONFIG": "1"}
    return {**found, **taken, "PYTHONNOUSERSITE": "1", "PIP_ROOT_USER_ACTION": "ignore", **more}


def _download(directory: str) -> None:
    stamp = {"wanted": list(WANTED), "python": sys.version, "machine": platform.machine()}
    stamp_path = os.path.join(directory, "stamp.json")
    try:
        with open(stamp_path, encoding="utf-8") as file:
            if json.load(file) == stamp:
                return
    except (OSError, ValueError):
        pass
    note(f"downloading the wheels of {len(WANTED)} packages and what they need, into {directory}")
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", "--dest", directory]
    argv += WANTED
    ran = subprocess.run(argv, env=make_environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if ran.returncode:
        raise BenchError(
            "pip cannot download the wheels of the environment; its index is that of its settings, or of"
            f" PIP_INDEX_URL; a folder of wheels can be given by --wheels. It says:\n{ran.stderr[-2000:]}"
        )
    cuda = [name for name in os.listdir(directory) if name.replace("_", "-").startswith(_CUDA)]
    if cuda:
        raise BenchError(
            f"pip finds {WANTED[0]} for GPUs, with {len(cuda)} packages as {cuda[0]}: name an index of torch's CPU"
            " wheels by PIP_EXTRA_INDEX_URL (https://download.pytorch.org/whl/cpu)"
        )
    with open(stamp_path, "w", encoding="utf-8") as file:
        json.dump(stamp, file)
