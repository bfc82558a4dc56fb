"""[tuning] of bootseer.toml reaches the processes of a job: services, which inherit it, and ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bootseer.tuning import VARIABLE
from tests.support import Programs

SERVICES = {"bootseer.checkpoint.service.service", "bootseer.env.compile_cache.service"}
TRAIN = """
import json, os, sys

found = {"rank": os.environ.get("BOOTSEER_TUNING")}
for name in filter(str.isdecimal, os.listdir("/proc")):
    try:
        words = open(f"/proc/{name}/cmdline").read().split("\\0")
        lines = open(f"/proc/{name}/environ").read().split("\\0")
    except OSError:
        continue
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    if variables.get("OF_TEST") == os.environ["OF_TEST"]:
        modules = [word for word in words[3:4] if word.startswith("bootseer.")]
        found.update(dict.fromkeys(modules, variables.get("BOOTSEER_TUNING")))
json.dump(found, open(sys.argv[1], "w"))
"""


@pytest.mark.leaks
@pytest.mark.parametrize("is_inherited", [False, True])
def test_every_service_and_rank_gets_the_limits(bootrun: Programs, tmp_path: Path, is_inherited: bool) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "model.bin").write_bytes(b"weights")
    config = tmp_path / "a.toml"
    config.write_text("[tuning.storage]\ntimeout_s = 12\n[tuning.env]\npublish_s = 99\n")
    found = tmp_path / "found.json"
    run = bootrun(
        *("--standalone", "--config", config, "--load-checkpoint", tmp_path / "ckpt", "--keep-caches"),
        *("--setup", "true", "--setup-target", tmp_path / "target", "--env-store", tmp_path / "store"),
        *(tmp_path / "train.py", found),
        env={"OF_TEST": os.fspath(tmp_path), VARIABLE: "env.publish_s=77" if is_inherited else None},
    )
    assert run.status == 0, run.stderr
    seen = json.loads(found.read_text())
    expected = f"storage.timeout_s=12.0 env.publish_s={77.0 if is_inherited else 99.0}"
    services = {name: value for name, value in seen.items() if name.startswith("bootseer.")}
    assert services.keys() >= SERVICES
    assert {*services.values(), seen["rank"]} == {expected}


@pytest.mark.leaks
def test_a_value_outside_of_its_range_ends_bootrun_before_anything_runs(bootrun: Programs, tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    config.write_text("[tuning.storage]\ntimeout_s = 0\n")
    run = bootrun("--standalone", "--config", config, "-m", "this")
    assert (run.status, run.stdout) == (1, "")
    assert run.stderr == (
        f"bootrun: error: {config}:2: [tuning.storage] timeout_s = 0: give a number of seconds from 0.5 to 3600\n"
    )
