"""`bench env`: which figures it makes of its samples; the whole of it with wheels that are made here."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import env, env_disk, env_machine, env_packages, env_ways
from bench.__main__ import main
from bench.env_kept import Kept, count
from bench.env_packages import Wheels, get_wheels
from bench.env_ways import REMOTE, WAYS, Sample
from bench.image_remote import Link
from bench.record import BenchError
from tests.integration.mounted_trees import need_mounts
from tests.made_wheels import make_wheel
from tests.support import lacking

ROUNDS = env.MINIMUM_ROUNDS
LINKS = [Link(199e6, 0.0055)] * ROUNDS


@pytest.fixture
def kept(tmp_path):
    for name in ("tar", "pack"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    names = [f"p{number}==1" for number in range(90)]
    return Kept(
        wheels=Wheels("/wheels", "/lock", names, 500),
        target="/target",
        reference="/reference",
        files=10,
        size=1000,
        data=str(tmp_path),
        tar=str(tmp_path / "tar"),
        packed="",
        keys="/keys",
        digest="ab" * 32,
        tree_files=10,
        packs=[str(tmp_path / "pack")],
        facts={"setup": 60.0, "end": 0.4, "build": 30.0},
    )


def taken(**other):
    ways = {way: Sample(8.0, 4.0) for way in WAYS}
    ways |= {"pip": Sample(80.0, 4.0), "uv_cold_compiled": Sample(30.0, 4.0), "cp": Sample(6.0, 4.0)}
    ways |= {"unpack": Sample(4.0, 4.0, 3.8), "mount": Sample(0.4, 6.0, 0.08)}
    ways |= {"mount_again": Sample(0.3, 5.0, 0.05)}
    ways |= {way: Sample(5.0, 4.0, 4.5, 10**9, 70) for way in REMOTE}
    return {way: [each] * ROUNDS for way, each in (ways | other).items()}


def met(figures):
    return {name for name, made in figures if name in env.TARGETS and env.TARGETS[name].is_met(made.value)}


def test_figures_are_made_of_the_ways_that_they_are_named_after(kept):
    figures = env.to_figures(kept, "on a disk", taken(), LINKS)
    assert figures["env.vs_cp"].value == 4 / 6
    assert figures["env.vs_pip"].value == 20
    assert figures["env.vs_uv_cold"].value == 7.5
    assert figures["env.mount_s"].value == 0.08
    assert figures["env.until_import_cp_vs_unpack"].value == 10 / 8
    assert figures["env.until_import_pip_vs_mount"].value == 84 / 6.4
    assert met(figures) == set(env.TARGETS)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"cp": Sample(5.0, 4.0)}, {"env.vs_cp"}),
        ({"pip": Sample(59.0, 4.0)}, {"env.vs_pip"}),
        ({"uv_cold_compiled": Sample(19.0, 4.0)}, {"env.vs_uv_cold"}),
        ({"uv_cold": Sample(1.0, 4.0)}, set()),
        ({"mount": Sample(0.4, 6.0, 0.11)}, {"env.mount_s"}),
    ],
)
def test_each_target_is_missed_by_what_it_is_about(kept, change, missed):
    right = met(env.to_figures(kept, "", taken(), LINKS))
    assert right - met(env.to_figures(kept, "", taken(**change), LINKS)) == missed


def test_ways_that_were_not_taken_make_no_figure(kept):
    few = {way: samples for way, samples in taken().items() if way in ("cp", "unpack")}
    figures = dict(env.to_figures(kept, "", few, LINKS))
    assert "env.vs_cp" in figures
    assert not {"env.vs_pip", "env.mount_s"} & set(figures)


def test_a_remote_that_sent_nothing_makes_no_figure(kept):
    with pytest.raises(BenchError, match="nothing was fetched"):
        env.to_figures(kept, "", taken(unpack_remote=Sample(1.0, 1.0, 1.0)), LINKS)


def test_wheels_are_pinned_and_have_what_is_imported(tmp_path):
    wheels = tmp_path / "wheels"
    make_wheel(wheels, "torch", "2.0")
    make_wheel(wheels, "some-thing", "1.2")
    with pytest.raises(BenchError, match="no wheel of transformers"):
        get_wheels(os.fspath(tmp_path), os.fspath(wheels))
    make_wheel(wheels, "transformers", "5.0")
    found = get_wheels(os.fspath(tmp_path), os.fspath(wheels))
    assert found.names == ["some-thing==1.2", "torch==2.0", "transformers==5.0"]
    with open(found.lock) as file:
        assert file.read().splitlines() == found.names


def test_what_cannot_be_downloaded_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(BenchError, match=r"(?s)cannot download .* PIP_INDEX_URL.*torch"):
        get_wheels(os.fspath(tmp_path))


def test_settings_of_installers_do_not_count(monkeypatch):
    monkeypatch.setenv("PIP_TARGET", "/elsewhere")
    monkeypatch.setenv("UV_CACHE_DIR", "/elsewhere")
    assert "/elsewhere" not in env_packages.clean_environ().values()


@pytest.mark.system
def test_the_disk_is_new_each_time_and_gone_at_the_end(tmp_path):
    if os.geteuid() or not shutil.which("mkfs.ext4") or not shutil.which("losetup"):
        lacking("a file system of its own needs root, mkfs.ext4 and losetup")
    disk = env_disk.Disk(os.fspath(tmp_path), 64 << 20)
    try:
        for _ in range(2):
            disk.renew()
            assert os.listdir(disk.path) == ["lost+found"]
            with open(os.path.join(disk.path, "file"), "w") as file:
                file.write("left")
        if "ext4" not in disk.kind:
            lacking("there are no loop devices here")
        # What a killed run leaves is taken away by the next one.
        again = env_disk.Disk(os.fspath(tmp_path), 64 << 20)
        again.renew()
        again.close()
    finally:
        disk.close()
    assert os.listdir(tmp_path) == []
    files = subprocess.run(["losetup", "--noheadings", "--output", "BACK-FILE"], capture_output=True, text=True)
    assert os.fspath(tmp_path) not in files.stdout


def make_wheels(directory):
    """A torch, a transformers, and what is large or many."""
    files = {f"torch/part{number}.py": f"VALUE = {number}\n" * 50 for number in range(60)}
    body = "from torch import part1, part2\nVERSION = '2.0'\n"
    files |= {"torch/__init__.py": body, "torch/lib.so": os.urandom(1 << 20)}
    make_wheel(directory, "torch", "2.0", files=files)
    make_wheel(directory, "transformers", "5.0", files={"transformers/__init__.py": "import torch\n"})
    for number in range(5):
        make_wheel(directory, f"more{number}", "1.0", scripts={f"more{number}": f"more{number}:main"})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Options for small wheels; what is made of them is kept for the next test."""
    need_mounts()
    try:
        env_ways.find_uv()
    except BenchError as error:
        lacking(str(error))
    wheels = tmp_path_factory.mktemp("made") / "wheels"
    make_wheels(wheels)
    folder = tmp_path_factory.mktemp("kept")
    return ["env", "--wheels", os.fspath(wheels), "--folder", os.fspath(folder), "--rounds", "1"]


@pytest.fixture
def folder(small, monkeypatch):
    """Where what was made is kept, in which nothing is mounted afterwards."""
    monkeypatch.setattr(env_machine, "TOUCHED_BYTES", 1 << 20)  # nothing is measured here
    monkeypatch.setattr(env, "_MIN_DISK_BYTES", 192 << 20)
    found = Path(small[4])
    yield found
    with open("/proc/self/mounts") as file:
        assert os.fspath(found) not in file.read()


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_bench_runs_with_small_wheels(small, folder, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert main([*small, "--json", os.fspath(path)]) == 0, capsys.readouterr().err
    figures = {name: made["value"] for name, made in json.loads(path.read_text())["figures"].items()}
    assert set(env.TARGETS) <= set(figures)
    ways = set(WAYS) if "env.packed_until_ready_s" in figures else set(WAYS) - {"packed"}
    assert {f"env.{way}_{what}_s" for way in ways for what in ("until_ready", "import")} <= set(figures)
    assert figures["env.packages"] == 7
    assert 0 < figures["env.mount_remote_mb"] <= figures["env.unpack_remote_mb"]
    assert figures["env.unpack_remote_3_mb"] > 2 * figures["env.unpack_remote_mb"]
    assert os.listdir(folder) == ["own"]
    assert not [name for name in os.listdir(folder / "own") if name.startswith(("disk", "remote"))]
    reference, _ = count(os.fspath(folder / "own" / "reference"))
    assert figures["env.files"] == reference > 60


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_some_ways_with_small_wheels(small, folder, capsys):
    few = ["--way", "unpack", "--way", "cp"]
    made = folder / "own" / "built.json"
    before = os.path.getmtime(made) if made.exists() else None
    assert main([*small, *few]) == 0, capsys.readouterr().err
    assert "env.vs_cp" in capsys.readouterr().out
    assert before in (None, os.path.getmtime(made))  # what was made is used again
