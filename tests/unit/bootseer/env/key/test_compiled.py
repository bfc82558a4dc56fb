"""What belongs into a key because something may be compiled, and what does not; whose restored files are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.env.capture.subtree import subtree
from bootseer.env.key.compiled import may_compile, needs_build
from bootseer.env.key.keying import Keyed, make_key
from bootseer.env.parse.requirements import RequestedPackage
from bootseer.env.reads.directory_digest import digest_directory, digest_project
from bootseer.env.restore.unpack import owned_by
from bootseer.env.spec import SetupSpec
from tests import made_trees as made

COMPILERS = ("cc", "c++", "g++")


def key_of(directory: Path, command: str, **environ: str) -> Keyed:
    spec = SetupSpec(commands=(command,), targets=(f"{directory}/venv",), cwd=str(directory))
    return make_key(spec, {"PATH": os.environ["PATH"], "HOME": "/home/me"} | environ)


def compilers(directory: Path, version: str) -> str:
    """A PATH with compilers that say this version."""
    place = directory / version
    place.mkdir()
    for name in COMPILERS:
        (place / name).write_text(f"#!/bin/sh\necho {name} {version}\n")
        (place / name).chmod(0o755)
    return f"{place}:{os.environ['PATH']}"


# ---- what is compiled --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "counts"),
    [
        ("pip install torch==2.13.0 -f wheels", False),
        ("pip install ./one-1.0-py3-none-any.whl", False),
        ("uv pip install -r plain.txt", False),
        ("conda install numpy=1.2=py_0", False),
        ("pip install --no-binary :all: ext==1.0", True),
        ("pip install --no-build-isolation flash-attn==2.7", True),
        ("pip install ext-1.0.tar.gz", True),
        ("pip install 'ext @ https://h/ext-1.0.tar.gz#sha256=00'", True),
        ("pip install git+https://h/o/r@" + "0" * 40, True),
        ("pip install ext==1.0 -f sources", True),
        ("pip install ./project", True),
        ("pip install -e ./project", True),
        ("pip install ./pure", False),
        ("pip install -r building.txt", True),
        ("./own.sh", True),
        ("python -c 'import x'", True),
    ],
)
def test_another_compiler_is_another_key_where_something_is_compiled(
    tmp_path: Path, command: str, counts: bool
) -> None:
    for name in ("wheels", "sources", "project", "pure"):
        (tmp_path / name).mkdir()
    (tmp_path / "wheels" / "torch-2.13.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"")
    (tmp_path / "sources" / "ext-1.0.tar.gz").write_bytes(b"")
    (tmp_path / "project" / "setup.py").write_text("")
    (tmp_path / "pure" / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    )
    (tmp_path / "plain.txt").write_text("one==1.0\n")
    (tmp_path / "building.txt").write_text("--no-binary ext\next==1.0\n")
    for name in ("one-1.0-py3-none-any.whl", "ext-1.0.tar.gz", "own.sh"):
        (tmp_path / name).write_bytes(b"x")
    old, new = (key_of(tmp_path, command, PATH=compilers(tmp_path, each)) for each in ("11.4.0", "14.2.0"))
    assert (old.key != new.key) is counts
    facts = {name for name in new.document.base if name.startswith("machine:")}
    assert ({"machine:cpu", "machine:c++", "machine:os"} <= facts) if counts else not facts


@pytest.mark.parametrize("variable", ["PIP_NO_BINARY", "UV_NO_BINARY"])
def test_variables_that_have_it_compiled(tmp_path: Path, variable: str) -> None:
    assert "machine:cpu" not in key_of(tmp_path, "pip install a==1").document.base
    assert "machine:cpu" in key_of(tmp_path, "pip install a==1", **{variable: ":all:"}).document.base


def test_requirements_of_sources() -> None:
    def of(text: str, fetcher: str = "") -> bool:
        return needs_build(RequestedPackage("", text, False, fetcher))

    assert of("a @ git+ssh://git@h/o/r")
    assert of("https://h/a-1.0.zip?x=1")
    assert of("downloads by cargo", "cargo")
    assert not of("downloads by cargo"), "it is a text"
    assert not of("downloads by curl", "curl")
    assert not of("https://h/a-1.0-py3-none-any.whl#sha256=00")
    assert not of("git==1.0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[build-system]\nrequires = ["flit_core"]\nbuild-backend = "flit_core.buildapi"\n', False),
        ('[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n', True),
        ('[build-system]\nrequires = ["hatchling", "hatch-cython"]\nbuild-backend = "hatchling.build"\n', True),
        (
            '[build-system]\nrequires = []\nbuild-backend = "hatchling.build"\n[tool.hatch.build.hooks.a]\nb=1\n',
            True,
        ),
        ('[build-system]\nrequires = []\nbuild-backend = "hatchling.build"\nbackend-path = ["."]\n', True),
        ("[project]\nname = 'a'\n", True),
        ("rubbish", True),
    ],
)
def test_projects_that_may_compile(tmp_path: Path, text: str, expected: bool) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    assert may_compile(str(tmp_path)) is expected
    (tmp_path / "setup.py").write_text("")
    assert may_compile(str(tmp_path))


def test_what_is_activated_is_no_matter(tmp_path: Path) -> None:
    """Set-up is told of its target in any case."""
    plain = key_of(tmp_path, "pip install a==1")
    venv = f"{tmp_path}/venv"
    assert key_of(tmp_path, "pip install a==1", VIRTUAL_ENV=venv).key == plain.key
    assert key_of(tmp_path, "pip install a==1", CONDA_PREFIX=venv, CONDA_DEFAULT_ENV="x").key == plain.key
    assert key_of(tmp_path, "pip install a==1", CONDA_PREFIX="/opt/other").key != plain.key


# ---- declared folders ---------------------------------------------------------------------------------------


def test_declared_directories_count_whole(tmp_path: Path) -> None:
    declared, outside = tmp_path / "declared", tmp_path / "outside"
    for directory in (declared / "build", declared / "x.egg-info", declared / ".git", outside / "deep"):
        directory.mkdir(parents=True)
    for place in (declared / "build" / "a", declared / "x.egg-info" / "a", declared / ".git" / "a"):
        place.write_text("1")
    (outside / "file").write_text("1")
    (outside / "deep" / "file").write_text("1")
    (declared / "link").symlink_to(outside / "file")
    (declared / "links").symlink_to(outside)
    (declared / "round").symlink_to(declared)
    (outside / "back").symlink_to(declared)
    (declared / "nowhere").symlink_to("nothing")

    def changes(path: Path, *, digest: object = digest_directory, excluded: tuple[str, ...] = ()) -> bool:
        before = digest(str(declared), excluded)  # type: ignore[operator]
        assert digest(str(declared), excluded) == before  # type: ignore[operator]
        path.write_text(path.read_text() + "more")
        return bool(digest(str(declared), excluded) != before)  # type: ignore[operator]

    assert changes(declared / "build" / "a")
    assert changes(declared / "x.egg-info" / "a")
    assert changes(outside / "file")
    assert changes(outside / "deep" / "file")
    assert not changes(declared / ".git" / "a")
    assert not changes(outside / "deep" / "file", excluded=(str(outside),)), "a target, which set-up changes"
    assert not changes(outside / "deep" / "file", digest=digest_project)
    assert changes(declared / "build" / "a", digest=digest_project), "a folder of its own"
    (declared / "build" / "a").rename(declared / "a")
    (declared / "build" / "lib.linux-x86_64").mkdir()
    (declared / "build" / "lib.linux-x86_64" / "a").write_text("1")
    assert not changes(declared / "build" / "lib.linux-x86_64" / "a", digest=digest_project)


def test_the_order_of_a_directory_is_no_matter(tmp_path: Path) -> None:
    """Two links to one folder, made in either order."""
    digests = set()
    for number, names in enumerate((("a", "b"), ("b", "a"))):
        top = tmp_path / str(number)
        (top / "outside").mkdir(parents=True)
        (top / "outside" / "file").write_text("1")
        (top / "declared").mkdir()
        for name in names:
            (top / "declared" / name).symlink_to("../outside")
        digests.add(digest_directory(str(top / "declared")))
    assert len(digests) == 1


# ---- owners -------------------------------------------------------------------------------------------------


def test_what_was_its_maker_s_is_the_target_s() -> None:
    index = made.make(
        [made.folder(b"0"), made.file(b"0/a", b"a"), made.file(b"0/b", b"b"), made.file(b"0/c", b"c")]
    )
    import msgspec

    tree = msgspec.structs.replace(index.index, uids=[0, 7, 7, 7, 9], gids=[0, 8, 8, 5, 5])
    below = owned_by(subtree(tree, b"0"), 1000, 100)
    assert below.tree.uids == [1000, 1000, 1000, 9]
    assert below.tree.gids == [100, 100, 100, 5]
    same = subtree(tree, b"0")
    assert owned_by(same, 7, 8) is same
