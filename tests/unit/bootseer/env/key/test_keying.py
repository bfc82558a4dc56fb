"""What may be a target, what a base is made of, how folders are hashed, what a spec may say. No interpreter."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bootseer.env.key.base import Interpreter, PathEntry, of_image, of_interpreter, of_node, with_known
from bootseer.env.key.keying import make_key
from bootseer.env.key.targets import check_target, resolve_targets
from bootseer.env.reads import directory_digest
from bootseer.env.reads.directory_digest import digest_archives, digest_directory, digest_file, digest_project
from bootseer.env.restore.used_directories import LOCK, UsedDirectory
from bootseer.env.service.image_target import clear, commands_of, directory_of, remove_old, with_own_target
from bootseer.env.spec import SetupSpec
from bootseer.errors import ConfigError, KeyUnknown
from tests.made_wheels import make_wheel
from tests.support import needs_program

ENVIRON = {"HOME": "/home/me"}


def interpreter(
    *directories: PathEntry, prefix: str = "/venv", is_venv: bool = True, **more: object
) -> Interpreter:
    values: dict[str, object] = {
        "version": "3.11.7",
        "implementation": "cpython",
        "build": "3.11.7 (main)",
        "abi": "cpython-311",
        "platform": "linux-x86_64",
        "libc": "glibc 2.36",
        "arch": "x86_64",
        "prefix": prefix,
        "base_prefix": "/usr",
        "is_venv": is_venv,
        "is_conda": False,
        "purelib": prefix + "/lib/python3.11/site-packages",
        "platlib": prefix + "/lib/python3.11/site-packages",
        "scripts": prefix + "/bin",
        "folders": list(directories),
        "conda": [],
    }
    return Interpreter(**{**values, **more})  # type: ignore[arg-type]


# ---- the spec ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"commands": ()}, "--setup"),
        ({"commands": ("a", " ")}, "command 2"),
        ({"commands": ("hunter22\0",)}, "NUL"),
        ({"commands": ("hunter22" * 10_000,)}, "longer"),
        ({"inputs": ("relative",)}, "--setup-input"),
        ({"targets": ("relative",)}, "--setup-target"),
        ({"cwd": ""}, "working directory"),
        ({"python": "python3"}, "interpreter"),
        ({"variables": ("A=hunter",)}, "--setup-variable"),
        ({"max_age_s": 0.0}, "--env-max-age"),
        ({"max_age_s": float("nan")}, "--env-max-age"),
        ({"timeout_s": -1.0}, "--setup-timeout"),
        ({"salt": "x" * 2000}, "--env-key"),
    ],
)
def test_a_spec_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SetupSpec(**{"commands": ("true",), **fields})  # type: ignore[arg-type]
    assert "hunter22" not in str(caught.value), "commands may hold secrets"
    assert "\n" not in str(caught.value)


# ---- targets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/usr",
            "/usr/bin",
            "/usr/lib",
            "/usr/share/x",
            "/etc",
            "/etc/venv",
            "/bin",
            "/lib/x",
            "/proc/self",
        ),
        *(
            "/sys",
            "/dev",
            "/dev/shm",
            "/boot",
            "/home",
            "/home/me",
            "/home/other",
            "/root",
            "/opt",
            "/tmp",
            "/var",
        ),
        *("/job/x/.git", "/job/.git/venv", "/usr/local/bin", "/run/x", "//", "/opt/.."),
    ],
)
def test_what_is_no_target(path: str) -> None:
    with pytest.raises(ConfigError, match=r"^--setup-target: "):
        check_target(path, ENVIRON)


@pytest.mark.parametrize(
    "path",
    [
        *("/opt/venv", "/usr/local", "/usr/local/lib/python3.11/site-packages", "/usr/lib/python3/dist-packages"),
        *("/home/me/venv", "/root/venv", "/tmp/venv", "/dev/shm/venv", "/data/x/y", "/opt/conda"),
    ],
)
def test_what_is_a_target(path: str) -> None:
    assert check_target(path, ENVIRON) == os.path.realpath(path)


def test_targets_are_resolved_and_need_not_exist(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    assert check_target(f"{tmp_path}/link/new", ENVIRON) == f"{tmp_path}/real/new"
    with pytest.raises(ConfigError, match="is not a directory"):
        check_target(f"{tmp_path}/file", ENVIRON)
    with pytest.raises(ConfigError, match="belongs to the system"):
        (tmp_path / "etc").symlink_to("/etc")
        check_target(f"{tmp_path}/etc", ENVIRON)


@pytest.mark.parametrize(
    ("one", "other"), [("/a/b", "/a/b/c"), ("/a/b/c", "/a/b"), ("/a/b", "/a/b"), ("/a/b", "/a/c/../b")]
)
def test_targets_do_not_nest(one: str, other: str) -> None:
    with pytest.raises(ConfigError, match="one contains the other"):
        resolve_targets([one, other], None, "", ENVIRON)


def test_targets_beside_each_other() -> None:
    assert resolve_targets(["/a/b", "/a/bc"], None, "", ENVIRON) == ["/a/b", "/a/bc"]


@pytest.mark.parametrize("store", ["/a/store", "file:///a/store", "local:///a", "/a/store/x"])
def test_the_store_is_in_no_target(store: str) -> None:
    with pytest.raises(ConfigError, match="environment store"):
        resolve_targets(["/a/store" if store != "local:///a" else "/a/x"], None, "", ENVIRON, store)
    assert resolve_targets(["/a/x"], None, "", ENVIRON, "s3://a/x") == ["/a/x"]


def test_the_default_target() -> None:
    assert resolve_targets([], interpreter(), "/venv/bin/python", ENVIRON) == ["/venv"]
    conda = interpreter(prefix="/opt/conda", is_venv=False, is_conda=True)
    assert resolve_targets([], conda, "/opt/conda/bin/python", ENVIRON) == ["/opt/conda"]
    system = interpreter(prefix="/usr", is_venv=False)
    with pytest.raises(
        ConfigError, match=r"/usr/bin/python3 has no environment of its own .*--setup-target /usr/lib"
    ):
        resolve_targets([], system, "/usr/bin/python3", ENVIRON)
    with pytest.raises(ConfigError, match="--setup-target DIR"):
        resolve_targets([], None, "", ENVIRON)


# ---- the base ----------------------------------------------------------------------------------------------

SITE = "/venv/lib/python3.11/site-packages"


def test_a_base_has_two_parts() -> None:
    inner = PathEntry(SITE, [("a", "1", "aa"), ("pip", "23", "bb")], ["/src/editable"])
    outer = PathEntry("/usr/lib/python3/dist-packages", [("a", "0", "cc"), ("b", "1", "")], [])
    editable = PathEntry("/src/editable", [("e", "1", "dd")], [])
    base = of_interpreter(interpreter(inner, outer, editable), "/nowhere/python", ["/venv"])
    assert base["target:dist:a"] == "1 aa"
    assert base["dist:a"] == "0 cc", "one in a target hides none outside"
    assert base["dist:b"] == "1"
    assert base["target:dist:e"] == "1 dd", "a .pth file of the target brought it"
    assert base["version"] == "3.11.7"


def test_an_interpreter_in_a_target_is_the_targets(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    python.write_text("")
    found = interpreter(prefix=str(tmp_path), is_venv=False, is_conda=True, conda=[("numpy", "1.0 py_0")])
    base = of_interpreter(found, str(python), [str(tmp_path)])
    assert base["target:version"] == "3.11.7"
    assert base["target:conda:numpy"] == "1.0 py_0"
    assert "version" not in base
    assert of_interpreter(found, str(python), ["/elsewhere"])["conda:numpy"] == "1.0 py_0"


def test_of_an_image_its_digest_counts_and_what_is_in_the_directory(tmp_path: Path) -> None:
    target = tmp_path / "env"
    spec = SetupSpec(
        commands=("pip install a==1",), targets=(f"{target}",), in_image=True, image="1" * 64, venv_of="python3"
    )
    first = make_key(spec, ENVIRON)
    assert first.document.base == {"kind": "image", "image": "1" * 64, "venv_of": "python3"}
    others = [
        structs.replace(spec, image="2" * 64),
        structs.replace(spec, venv_of="python3.12"),
        structs.replace(spec, commands=("pip install a==2",)),
    ]
    assert len({first.key, *(make_key(each, ENVIRON).key for each in others)}) == 4
    target.mkdir()
    assert make_key(spec, ENVIRON).key == first.key, "an empty folder is as none"
    (target / "left").touch()
    later = make_key(spec, ENVIRON)
    assert later.key != first.key and later.document.base[f"target:{target}"]
    assert make_key(spec, ENVIRON, known_base=first.document.base).key == first.key
    with pytest.raises(KeyUnknown, match="without a digest of its content"):
        make_key(structs.replace(spec, image=""), ENVIRON)


def test_the_directory_on_top_of_an_image_has_its_name_by_all_that_decides_it(tmp_path: Path) -> None:
    environ = {**ENVIRON, "BOOTSEER_CACHE": f"{tmp_path}/cache"}
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("a==1\n")
    spec = SetupSpec(commands=(f"pip install -r {wanted}",), in_image=True, image="1" * 64)
    first = with_own_target(spec, "python3", environ)
    assert re.fullmatch(f"{tmp_path}/cache/image-envs/[0-9a-f]{{16}}/env", first.targets[0])
    assert first == with_own_target(spec, "python3", environ)
    venv, *others = commands_of(first)
    assert others == list(spec.commands) and venv.startswith(
        "python3 -m venv --system-site-packages --without-pip"
    )
    assert commands_of(spec) == spec.commands
    wanted.write_text("a==2\n")
    second = with_own_target(spec, "python3", environ)
    unknown = with_own_target(structs.replace(spec, image=""), "python3", environ)
    alone = [
        with_own_target(structs.replace(spec, image=""), "python3", environ, job=job) for job in ("a", "b", "a")
    ]
    assert len({first.targets, second.targets, unknown.targets, *(each.targets for each in alone)}) == 5
    assert alone[0] == alone[2], "of one job"
    assert with_own_target(spec, "python3", environ, job="a") == second, "what has a key is for all jobs"


def test_a_directory_of_ours_is_emptied_unless_a_job_uses_it(tmp_path: Path) -> None:
    environ = {**ENVIRON, "BOOTSEER_CACHE": f"{tmp_path}/cache"}
    spec = with_own_target(SetupSpec(commands=("true",), in_image=True, image="1" * 64), "python3", environ)
    target = Path(spec.targets[0])
    assert clear(spec), "there is nothing"
    (target / "half" / "made").mkdir(parents=True)
    used = UsedDirectory(directory_of(spec))
    assert not clear(spec) and (target / "half" / "made").exists()
    waiting = UsedDirectory(directory_of(spec))
    assert not clear(spec, waiting) and (target / "half" / "made").exists(), "two jobs, and one looks"
    waiting.close()
    assert clear(spec, used) and not target.exists(), "its own use is in nobody's way"
    (target / "half" / "made").mkdir(parents=True)
    assert not clear(spec) and target.exists(), "it is in use still"
    used.close()
    assert clear(spec) and not target.exists()
    old_s = time.time() - 40 * 86400
    os.utime(target.parent / LOCK, (old_s, old_s))
    assert remove_old(environ) == [f"{target.parent}"]
    assert not target.parent.exists()
    alone = with_own_target(SetupSpec(commands=("true",), in_image=True), "python3", environ, job="a")
    used = UsedDirectory(directory_of(alone))
    old_s = time.time() - 2 * 86400
    os.utime(f"{used.path}/{LOCK}", (old_s, old_s))
    assert remove_old(environ) == []
    used.close()
    assert remove_old(environ) == [used.path], "a day after its job"


def test_what_is_known_counts_for_the_target_only() -> None:
    before = {"kind": "python", "version": "3.11", "dist:o": "1", "target:dist:a": "1"}
    after = {"kind": "python", "version": "3.11", "dist:o": "1", "target:dist:a": "2", "target:dist:new": "1"}
    assert with_known(after, before) == before
    assert with_known({**after, "version": "3.12"}, before) == {**before, "version": "3.12"}
    assert with_known({**after, "dist:o": "2"}, before) == {**before, "dist:o": "2"}
    assert with_known(of_image("sha256:x"), before) == of_image("sha256:x")
    assert with_known(after, of_image("sha256:x")) == after
    assert with_known(after, of_node()) == of_node(), "set-up made the interpreter"


tables = st.dictionaries(
    st.sampled_from(["version", "dist:a", "target:dist:a", "target:dist:b"]), st.sampled_from("12")
)


@given(tables, tables)
def test_known_bases_hold_until_something_outside_changes(before: dict[str, str], after: dict[str, str]) -> None:
    before["kind"] = after["kind"] = "python"
    merged = with_known(after, before)
    outside = [
        {key: text for key, text in each.items() if not key.startswith("target:")} for each in (before, after)
    ]
    assert (merged == before) == (outside[0] == outside[1])
    assert with_known(after, merged) == merged


# ---- folders -----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "folder"
    (top / "pkg").mkdir(parents=True)
    (top / "pkg/__init__.py").write_text("A = 1\n")
    (top / "pkg/module.py").write_text("B = 1\n")
    (top / "pkg/code.c").write_text("int x;\n")
    (top / "setup.py").write_text("pass\n")
    (top / "link").symlink_to("pkg/module.py")
    return top


def write(path: str, text: str = "other\n") -> Callable[[Path], object]:
    def act(top: Path) -> None:
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(text)

    return act


def relink(top: Path) -> None:
    (top / "link").unlink()
    (top / "link").symlink_to("setup.py")


def listen(top: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(top)  # names of sockets are short
        try:
            made.bind("socket")
        finally:
            os.chdir(here)


@pytest.mark.parametrize(
    ("act", "counts", "counts_editable"),
    [
        pytest.param(write("pkg/module.py"), True, False, id="a module"),
        pytest.param(write("pkg/__init__.py"), True, True, id="where versions stand"),
        pytest.param(write("pkg/code.c"), True, True, id="a source that is compiled"),
        pytest.param(write("setup.py"), True, True, id="the build"),
        pytest.param(write("pkg/new.py"), True, True, id="a new module"),
        pytest.param(write("data/model.bin"), True, False, id="data"),
        pytest.param(write("pkg/__pycache__/x.py"), False, False, id="bytecode folder"),
        pytest.param(write("pkg/x.pyc"), None, False, id="bytecode"),
        pytest.param(write("build/lib/x.py"), None, False, id="build"),
        pytest.param(write("a.egg-info/SOURCES.txt"), None, False, id="egg-info"),
        pytest.param(write(".git/index"), False, False, id="git"),
        pytest.param(write("env/pyvenv.cfg"), False, False, id="an environment"),
        pytest.param(write("target/x.py"), False, False, id="a target"),
        pytest.param(relink, True, True, id="a link"),
        pytest.param(listen, False, False, id="a socket"),
        pytest.param(lambda top: os.mkfifo(top / "fifo"), False, False, id="a fifo"),
        pytest.param(lambda top: (top / "empty").mkdir(), False, False, id="an empty folder"),
        pytest.param(lambda top: (top / "setup.py").chmod(0o755), True, True, id="may be executed"),
        pytest.param(lambda top: (top / "setup.py").chmod(0o640), False, False, id="other mode bits"),
        pytest.param(lambda top: os.utime(top / "setup.py", (1, 1)), False, False, id="times"),
        pytest.param(lambda top: (top / "setup.py").rename(top / "Setup.py"), True, True, id="a name"),
        pytest.param(
            lambda top: top.rename(top.parent / "x") and (top.parent / "x").rename(top), False, False, id="moved"
        ),
    ],
)
def test_what_changes_the_digest_of_a_directory(
    folder: Path, act: Callable[[Path], object], counts: bool | None, counts_editable: bool
) -> None:
    """`counts`: None: only in a folder that was declared, and not in a project."""

    def digests() -> tuple[str, str, str]:
        excluded = [f"{folder}/target"]
        path = str(folder)
        editable = digest_project(path, excluded, is_editable=True)
        return digest_directory(path, excluded), digest_project(path, excluded), editable

    before = digests()
    act(folder)
    after = digests()
    differ = [one != other for one, other in zip(before, after, strict=True)]
    assert differ == [counts is not False, bool(counts), counts_editable]


@needs_program("git")
def test_what_git_ignores_is_not_installed(folder: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "init.defaultBranch=main", "-C", str(folder), *words], check=True, capture_output=True
        )

    git("init", "-q")
    (folder / ".gitignore").write_text("outputs/\n")
    git("add", "pkg", "setup.py", "link")
    before, whole = digest_project(str(folder)), digest_directory(str(folder))
    write("outputs/model.bin")(folder)
    assert digest_project(str(folder)) == before
    assert digest_directory(str(folder)) != whole, "what is declared counts whole"
    write("pkg/untracked.py")(folder)
    assert (now := digest_project(str(folder))) != before
    (folder / "pkg/untracked.py").unlink()
    assert digest_project(str(folder)) == before != now
    (folder / "pkg/module.py").unlink()  # git still has it in its index
    assert digest_project(str(folder)) != before


def test_names_and_contents_cannot_be_mixed_up(tmp_path: Path) -> None:
    seen = set()
    for number, files in enumerate([{"a": "bc"}, {"ab": "c"}, {"a": "b", "c": ""}, {"a\nf": "bc"}, {}]):
        top = tmp_path / str(number)
        top.mkdir()
        for name, text in files.items():
            (top / name).write_text(text)
        seen.add(digest_directory(str(top)))
    assert len(seen) == 5


def test_directories_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_digest, "MAX_FILES", 4)
    with pytest.raises(ConfigError, match=r"folder: has more than 4 files: .*--setup-input"):
        digest_directory(str(folder))
    monkeypatch.setattr(directory_digest, "MAX_FILES", 5)
    monkeypatch.setattr(directory_digest, "MAX_BYTES", 5)
    with pytest.raises(ConfigError, match=r"folder: has more than 5 bytes: .*--setup-input"):
        digest_directory(str(folder))


def test_what_is_no_file(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "folder", "nothing"):
        with pytest.raises(ConfigError, match=f"{name}: cannot be read as an input"):
            digest_file(str(tmp_path / name))
    with pytest.raises(ConfigError, match="nothing: there is no such directory"):
        digest_directory(str(tmp_path / "nothing"))


def test_archives_are_known_by_their_ends(tmp_path: Path) -> None:
    make_wheel(tmp_path, "one", "1.0", files={"one/data.bin": os.urandom(300_000)})
    before = digest_archives(str(tmp_path))
    (tmp_path / "notes.txt").write_text("no archive")
    assert digest_archives(str(tmp_path)) == before
    make_wheel(tmp_path, "one", "1.0", files={"one/data.bin": os.urandom(300_000)})
    assert digest_archives(str(tmp_path)) != before, "the same name and size, another content"


# ---- without an interpreter --------------------------------------------------------------------------------


def test_an_image_is_the_base_of_what_runs_in_it(tmp_path: Path) -> None:
    spec = SetupSpec(
        commands=("true",),
        targets=(f"{tmp_path}/t",),
        python="/only/in/the/image/python",
        in_image=True,
        image="0" * 64,
    )
    keyed = make_key(spec, {})
    assert keyed.document.base == {"kind": "image", "image": "0" * 64}
    assert make_key(structs.replace(spec, image="1" * 64), {}).key != keyed.key
    with pytest.raises(ConfigError, match="--setup-target DIR"):
        make_key(structs.replace(spec, targets=()), {})


def test_an_interpreter_that_set_up_makes(tmp_path: Path) -> None:
    venv = f"{tmp_path}/venv"
    spec = SetupSpec(commands=(f"python3 -m venv {venv}",), targets=(venv,), python=f"{venv}/bin/python")
    assert make_key(spec, {}).document.base["kind"] == "none"
    with pytest.raises(ConfigError, match="there is no such interpreter"):
        make_key(SetupSpec(commands=("true",), python=f"{venv}/bin/python"), {})


@pytest.mark.parametrize(
    ("name", "value", "decides"),
    [
        ("POETRY_INSTALLER_NO_BINARY", "beta", True),
        ("POETRY_WITHOUT", "dev", True),
        ("PDM_NO_BINARY", "beta", True),
        ("PIPENV_PIPFILE", "/jobs/Pipfile", True),
        ("HATCH_ENV", "train", True),
        ("SKBUILD_CMAKE_ARGS", "-DX=1", True),
        ("POETRY_CACHE_DIR", "/elsewhere", False),
        ("POETRY_VIRTUALENVS_PATH", "/elsewhere", False),
        ("PDM_CACHE_DIR", "/elsewhere", False),
        ("PDM_CHECK_UPDATE", "0", False),
        ("PIPENV_CACHE_DIR", "/elsewhere", False),
        ("PIPENV_VERBOSITY", "-1", False),
        ("HATCH_QUIET", "1", False),
    ],
)
def test_variables_of_other_installers(tmp_path: Path, name: str, value: str, decides: bool) -> None:
    spec = SetupSpec(commands=("true",), targets=(f"{tmp_path}/t",))
    before, after = make_key(spec, ENVIRON), make_key(spec, {**ENVIRON, name: value})
    assert (before.key != after.key) is decides


def test_secrets_of_other_installers_are_in_no_key(tmp_path: Path) -> None:
    spec = SetupSpec(commands=("true",), targets=(f"{tmp_path}/t",))
    for name in ("POETRY_HTTP_BASIC_OWN_PASSWORD", "POETRY_PYPI_TOKEN_OWN", "PDM_PUBLISH_PASSWORD"):
        keyed = make_key(spec, {**ENVIRON, name: "hunter-two"})
        assert "hunter-two" not in str(keyed.document)
