"""--image and its like on the command line, and what ranks are told of a checkpoint inside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.errors import ConfigError, UsageError
from bootseer.mounts.sandbox.binds import Bind, UnboundPath
from launcher.cli.parser import parse
from launcher.provision.image import checkpoint_paths, figures_line, reachable, without_files
from launcher.ranks.environ import RANK_VARIABLES, rank_environ
from launcher.ranks.program import RankProgram, own_program
from launcher.rendezvous.messages import World
from launcher.spec import LaunchSpec, build_spec

OMP = {"OMP_NUM_THREADS": "1"}


def spec_of(*argv: str, **environ: str) -> LaunchSpec:
    values = {**OMP, **environ}
    return build_spec(parse(argv, values), values)


def refused(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        spec_of(*argv, __file__)
    assert "\n" not in str(caught.value) and caught.value.exit_status == 2
    return str(caught.value)


def test_without_an_image() -> None:
    assert spec_of(__file__).image is None


def test_an_image_and_its_defaults() -> None:
    image = spec_of("--image", "hdfs://x/images/train", __file__).image
    assert image is not None
    assert (image.url, image.name, image.writable) == ("hdfs://x/images/train", "", "tmpfs")
    assert (image.binds, image.pythons, image.environ) == ((), ("python3", "python"), {})


def test_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    image = spec_of(
        "--image=trees/train", "--image-name", "team/train", "--image-writable", "upper",
        "--image-bind", "data:/data:ro", "--image-bind=no:/root", "--image-python", "/opt/py/bin/python",
        "--image-env", "A=b,c", "--image-env=B=", __file__,
    ).image  # fmt: skip
    assert image is not None
    assert (image.url, image.name) == (f"{tmp_path}/trees/train", "team/train")
    assert image.writable == f"{tmp_path}/upper"
    assert image.binds == (Bind(f"{tmp_path}/data", "/data", True), UnboundPath("/root"))
    assert image.pythons == ("/opt/py/bin/python",) and image.environ == {"A": "b,c", "B": ""}
    assert (found := spec_of("--image", "rootfs:here", __file__).image) and found.url == f"rootfs:{tmp_path}/here"


def test_variables_give_them_too() -> None:
    image = spec_of(
        __file__, BOOTSEER_IMAGE="/trees/x", BOOTSEER_IMAGE_BIND="/a:/b,/c:/d:ro", BOOTSEER_IMAGE_ENV="A=1,B=x,,y"
    ).image
    assert image is not None
    assert image.binds == (Bind("/a", "/b"), Bind("/c", "/d", True)) and image.environ == {"A": "1", "B": "x,y"}
    more = spec_of("--image-bind", "/e:/f", __file__, BOOTSEER_IMAGE="/x", BOOTSEER_IMAGE_BIND="/a:/b").image
    assert more is not None and more.binds == (Bind("/a", "/b"), Bind("/e", "/f"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--image", ""), "--image ''"),
        (("--image", "rootfs:"), "names no directory"),
        (("--image", "docker://python:3.11"), "bootseer image build docker://python:3.11 URL"),
        (("--image-bind", "/a:/b"), "--image-bind has no effect"),
        (("--image-writable", "none"), "--image-writable has no effect"),
        (("--image-env", "A=1"), "--image-env has no effect"),
        (("--image", "x", "--image-bind", "/a:b"), "--image-bind '/a:b'"),
        (("--image", "x", "--image-env", "A"), "give NAME=VALUE"),
        (("--image", "x", "--image-env", "RANK=1"), "bootrun sets RANK in each rank"),
        (("--image", "x", "--image-python", "bin/python"), "--image-python 'bin/python'"),
        (("--image", "x", "--image-writable", ""), "--image-writable ''"),
    ],
)
def test_mistakes(words: tuple[str, ...], says: str) -> None:
    assert says in refused(*words)


def test_scripts_of_the_image() -> None:
    assert spec_of("--image", "x", "/workspace/of/image/train.py").entry.target == "/workspace/of/image/train.py"
    with pytest.raises(ConfigError, match="does not exist"):
        spec_of("--image", "x", "no_such_script.py")
    with pytest.raises(ConfigError, match="does not exist"):
        spec_of("/workspace/of/image/train.py")


def test_an_interpreter_of_the_node_is_not_the_images() -> None:
    assert any(
        "PYTHON_EXEC is not used" in line for line in spec_of("--image", "x", __file__, PYTHON_EXEC="/p").warnings
    )


def test_the_variables_that_are_bootruns_are_all_known() -> None:
    spec = spec_of("--nproc-per-node", "2", __file__)
    given = rank_environ(spec, World(0, 0, 0, 1, 0, 2, 0, 2, "h", 1), 0, "/e", None, {})
    assert set(given) - RANK_VARIABLES == {"OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}


def test_what_ranks_inherit() -> None:
    program = RankProgram("/py", "/in", "/pre", environ={"PATH": "/image"}, unset=("CONDA_PREFIX",))
    assert program.inherited({"PATH": "/node", "CONDA_PREFIX": "/c", "A": "1"}) == {"PATH": "/image", "A": "1"}
    assert own_program("/other/python").inside.endswith("launcher/in_rank/bootstrap.py")
    assert own_program("/other/python").inherited({"A": "1"}) == {"A": "1"}


CHECKPOINT = {
    "BOOTSEER_CHECKPOINT": "/tmp/arena/files", "BOOTSEER_CHECKPOINT_URL": "file:///data/ckpt",
    "BOOTSEER_ARENA": "/tmp/arena/socket", "BOOTSEER_SAVE_ARENA": "/tmp/arena/saves",
}  # fmt: skip


def test_paths_that_ranks_may_open() -> None:
    assert checkpoint_paths(CHECKPOINT, "/data/ckpt") == [
        "/tmp/arena/files", "/tmp/arena/socket", "/tmp/arena/saves", "/data/ckpt",
    ]  # fmt: skip
    assert checkpoint_paths({"BOOTSEER_CHECKPOINT": "s3://x/y"}, "s3://x/y") == []


def test_what_is_not_seen_inside_is_not_reported() -> None:
    assert reachable(CHECKPOINT, "/data/ckpt", []) == (CHECKPOINT, "")
    found, line = reachable(CHECKPOINT, "/data/ckpt", ["/tmp/arena/files", "/tmp/arena/socket"])
    assert found["BOOTSEER_CHECKPOINT"] == "/data/ckpt" and "BOOTSEER_ARENA" not in found
    assert found["BOOTSEER_SAVE_ARENA"] == "/tmp/arena/saves"
    assert "/tmp/arena/files" in line and "/data/ckpt" in line
    found, line = reachable(CHECKPOINT, "/data/ckpt", ["/tmp/arena/files", "/data/ckpt"])
    assert found["BOOTSEER_CHECKPOINT"] == "file:///data/ckpt" and "its URL" in line


def test_figures_in_one_line() -> None:
    assert figures_line({}) == ""
    line = figures_line(
        {"blocked_s": 0.034, "read_bytes": 84e6, "requests": 612, "prefetch_blocks": 99, "demand_blocks": 1}
    )
    assert line == "image: 84 MB fetched in 612 requests, 99% prefetched; stall time 0.03 s"
    assert figures_line({"blocked_s": 1.0, "recorded": 1.0}).endswith(" s; recorded for the next start")


def test_the_launch_path_stays_light() -> None:
    """Without --image nothing of it is imported."""
    import subprocess
    import sys

    code = "import sys, launcher.app, launcher.agent.node\n"
    code += "print([m for m in sys.modules if 'image' in m or 'bootseer.mounts' in m])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=os.getcwd())
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("missing", "own", "is_told"),
    [
        ([], "/data/ckpt", False),
        (["/tmp/arena/files"], "/data/ckpt", False),
        (["/tmp/arena/files", "/data/ckpt"], "/data/ckpt", True),
        (["/tmp/arena/files"], "", True),
    ],
)
def test_no_rank_starts_where_it_would_find_no_files(missing: list[str], own: str, is_told: bool) -> None:
    found, _ = reachable(CHECKPOINT, own, missing)
    why = without_files(CHECKPOINT, found)
    assert bool(why) == is_told and ("--image-bind" in why) == is_told
    assert without_files({}, {}) == "" and without_files({"BOOTSEER_CHECKPOINT": ""}, {}) == ""
