"""torchrun of another torch version, over the binary parts of the one that is installed.

In: a version, or the wheel of it (any platform: the launcher is Python alone). Out: a command that is that
version's torchrun. Ranks import the installed torch; so what is compared is the launcher.
"""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

# What of torch/ is the launcher's, in all versions.
PARTS = (
    "distributed/run.py",
    "distributed/argparse_util.py",
    "distributed/elastic",
    "distributed/launcher",
    "numa",
)
SCRIPT = """#!{python}
import sys
sys.path.insert(0, {folder!r})
if __name__ == "__main__":  # processes that it spawns import it anew
    from torch.distributed.run import main
    sys.exit(main())
"""


def make(version: str, directory: str, wheel: str = "") -> str:
    """The path of torchrun of that version, made below `directory`; without a wheel pip brings one."""
    installed = Path(str(metadata.distribution("torch").locate_file("torch")))
    made = Path(directory) / "torch"
    if not wheel:
        argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", directory, f"torch=={version}"]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        [wheel] = glob.glob(f"{directory}/torch-{version}*.whl")
    _link(installed, made, apart={part.partition("/")[0] for part in PARTS} | {"version.py"})
    _link(installed / "distributed", made / "distributed", {part.partition("/")[2] for part in PARTS})
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            inside = name.removeprefix("torch/")
            if inside == "version.py" or inside.startswith(tuple(PARTS)):
                archive.extract(name, directory)
    script = Path(directory) / "torchrun"
    script.write_text(SCRIPT.format(python=sys.executable, folder=directory), encoding="utf-8")
    script.chmod(0o755)
    return os.fspath(script)


def _link(source: Path, target: Path, apart: set[str]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name not in apart | {"__pycache__"}:
            (target / entry.name).symlink_to(entry)
