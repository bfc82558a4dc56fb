"""What a job does whose installed package cannot be read, beside torchrun: `python -m bench.mount_fails`.

The same training script, two ranks, two restarts. Under torchrun the package lies in a folder, and a reader of it
gets input errors (the disk below it fails: a FUSE mount of one file, that answers EIO). Under bootrun it is an
environment that is mounted from a store, whose blocks are damaged there. Needs root and torch. Prints a table.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bootseer.mounts.device.file import Done, FlatFile
from bootseer.mounts.tree_daemon.mount import list_trees, unmount_tree

SCRIPT = """
import os
import small
print("rank", os.environ["RANK"], "trains with small", small.VERSION, "in attempt",
      os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""
DEADLINE_S = 300.0


class BrokenDisk:
    """A device of which nothing can be read."""

    size = 1 << 20

    def try_read(self, offset: int, target: memoryview) -> bool:
        del offset, target
        return False

    def read_later(self, offset: int, length: int, done: Done) -> None:
        del offset, length
        done(None)


def run(name: str, words: list[str], environ: dict[str, str]) -> tuple[str, int, float, str]:
    began_s = time.monotonic()
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    took_s = time.monotonic() - began_s
    said = done.stdout + done.stderr
    wanted = ("small 1.0", "class mount", "class platform", "set-up took", "warning: reads", "FAILED", "Errno 5]")
    print(f"---- {name}: status {done.returncode} after {took_s:.1f} s")
    lines = dict.fromkeys(line[:240] for line in said.splitlines() if any(each in line for each in wanted))
    for line in lines:
        print(f"     {line}")
    return name, done.returncode, took_s, said


def under_torchrun(top: Path, environ: dict[str, str]) -> list[tuple[str, int, float, str]]:
    """Its environment lies in a folder; the module's file is a link to what cannot be read."""
    site, disk = top / "site", top / "disk"
    (site / "small").mkdir(parents=True)
    disk.mkdir()
    flat = FlatFile(os.fspath(disk))
    flat.start(BrokenDisk())
    try:
        (site / "small" / "__init__.py").symlink_to(flat.path)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words += ["--max-restarts", "2", os.fspath(top / "train.py")]
        first = {**environ, "PYTHONPATH": os.fspath(site)}
        return [run(f"torchrun, {which}", words, first) for which in ("the start that meets it", "the next start")]
    finally:
        flat.stop()


def under_bootrun(top: Path, environ: dict[str, str]) -> list[tuple[str, int, float, str]]:
    """The first start installs and publishes; then the kept blocks are damaged, and each start is a new node's."""
    source, venv, pristine, store = (top / name for name in ("src", "venv", "pristine", "store"))
    (source / "small").mkdir(parents=True)
    (source / "small" / "__init__.py").write_text("VERSION = '1.0'\n")
    (source / "small" / "data.bin").write_bytes(random.Random(1).randbytes(300_000))
    store.mkdir(mode=0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", venv], check=True)
    shutil.copytree(venv, pristine, symlinks=True)
    (site,) = venv.glob("lib/python*/site-packages")
    words = [sys.executable, "-m", "launcher", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    words += ["--restart-backoff", "0", "--no-keep-caches", "--setup", f"cp -r {source}/. {site}"]
    words += ["--setup-input", f"{source}", "--setup-target", f"{venv}", "--env-store", f"{store}"]
    words += ["--log-dir", f"{top}/logs", f"{top}/train.py"]
    environ = {**environ, "PYTHON_EXEC": f"{venv}/bin/python", "BOOTSEER_MOUNT_DEADLINE": "5"}

    def renew() -> None:
        for tree in list_trees(environ=environ):
            unmount_tree(tree.digest, force=True, environ=environ)
        shutil.rmtree(venv)
        shutil.copytree(pristine, venv, symlinks=True)
        shutil.rmtree(top / "cache", ignore_errors=True)

    found = [run("bootrun, the first start: it installs", words, environ)]
    end_s = time.monotonic() + 60
    while not list(store.glob("keys/*/env-*.json")) and time.monotonic() < end_s:
        time.sleep(0.1)
    time.sleep(1.0)
    for pack in store.glob("trees/*/packs/*"):
        pack.write_bytes(b"\xff" * pack.stat().st_size)
    renew()
    found.append(run("bootrun, the start that meets it", words, environ))
    end_s = time.monotonic() + 60
    while len(list(store.glob("keys/*/env-*.json"))) < 2 and time.monotonic() < end_s:
        time.sleep(0.1)
    time.sleep(1.0)
    renew()
    found.append(run("bootrun, the next start, on another node", words, environ))
    renew()
    return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mount-fails-") as directory:
        top = Path(directory)
        (top / "train.py").write_text(SCRIPT)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("BOOTSEER_")}
        environ |= {
            "OMP_NUM_THREADS": "1",
            "BOOTSEER_CACHE": f"{top}/cache",
            "BOOTSEER_RUNTIME": f"{top}/run",
            "PYTHONPATH": os.getcwd(),
        }
        rows = [*under_torchrun(top, environ), *under_bootrun(top, environ)]
    print(f"\n{'':44} {'status':>6} {'seconds':>8}  trained  blamed")
    for name, status, took_s, said in rows:
        trained = "yes" if "trains with small 1.0" in said else "no"
        blamed = "the mount" if "class mount" in said else "a disk" if "class platform" in said else "-"
        print(f"{name:44} {status:6} {took_s:8.1f}  {trained:7}  {blamed}")


if __name__ == "__main__":
    main()
