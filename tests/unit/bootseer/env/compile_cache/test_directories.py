"""Where compile caches are, what ranks are told, who uses them, and what killed processes leave there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bootseer.env.compile_cache.collect import collect, is_locked, path_prefix
from bootseer.env.compile_cache.directories import (
    KEY_LETTERS,
    CachePlace,
    KeyDirectory,
    choose_caches,
    is_read,
    last_use_s,
    mark_unread,
    remove_old,
    shows_reads,
    topology_variables,
)
from bootseer.env.compile_cache.key import (
    CachesDocument,
    instructions,
    key_of,
    read_accelerators,
    read_node_type,
)
from bootseer.env.compile_cache.kinds import KINDS, NCCL
from bootseer.env.compile_cache.store import _below
from bootseer.env.compile_cache.tidy import make_room, mark_all, tidy
from bootseer.errors import ConfigError
from tests.unit.bootseer.env.compile_cache.test_kinds import elf

KEY = "ab" * 32
BY_NAME = {kind.name: kind for kind in KINDS}
HOUR_S = 3600


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"BOOTSEER_CACHE": os.fspath(tmp_path / "cache")}


def place(directory: Path, name: str) -> CachePlace:
    path = directory / name
    path.mkdir(exist_ok=True)
    return CachePlace(BY_NAME[name], os.fspath(path))


def write(path: Path, data: bytes = b"x", *, age_s: float = 60.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    at = time.time() - age_s
    os.utime(path, (at, at))
    return path


def collected(*places: CachePlace) -> list[str]:
    return [each.path for each in collect(places, {}, pause=lambda _: None).found]


# ---- variables ---------------------------------------------------------------------------------------------


def test_ranks_are_reported_where_their_caches_are() -> None:
    chosen = choose_caches("/c/k", {}, {})
    assert chosen.variables["TORCHINDUCTOR_CACHE_DIR"] == "/c/k/inductor"
    assert chosen.variables["TRITON_CACHE_AUTOTUNING"] == "1"
    assert {each.path for each in chosen.places} == {f"/c/k/{kind.name}" for kind in KINDS}
    assert not any(name.startswith("NCCL") for name in chosen.variables)
    assert chosen.notes == []


def test_what_the_user_has_set_stays_and_is_left_alone() -> None:
    environ = {"TRITON_CACHE_DIR": "/mine", "CUDA_CACHE_MAXSIZE": "7", "JAX_COMPILATION_CACHE_DIR": ""}
    chosen = choose_caches("/c/k", environ, {})
    assert not set(environ) & set(chosen.variables)
    assert "TRITON_CACHE_AUTOTUNING" not in chosen.variables
    assert not {"triton", "jax"} & {each.kind.name for each in chosen.places}
    assert "cuda" in {each.kind.name for each in chosen.places}
    assert any("TRITON_CACHE_DIR=/mine" in note for note in chosen.notes)


def test_a_directory_of_the_users_inside_ours_is_kept() -> None:
    chosen = choose_caches("/c/k", {"TRITON_CACHE_DIR": "/c/k/triton"}, {}, only=("triton",))
    assert chosen.places == [CachePlace(BY_NAME["triton"], "/c/k/triton")]
    assert "TRITON_CACHE_DIR" not in chosen.variables


def test_own_directories_have_names() -> None:
    chosen = choose_caches("/c/k", {}, {"vllm": "/data/vllm"}, only=("jax",))
    assert [(each.kind.name, each.path) for each in chosen.places] == [("jax", "/c/k/jax"), ("vllm", "/data/vllm")]


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Vllm", "/a"),
        ("../x", "/a"),
        ("", "/a"),
        ("triton", "/a"),
        ("nccl", "/a"),
        ("v", "a"),
        ("v", "/"),
        ("v", "/c"),
    ],
)
def test_own_directories_that_cannot_be(name: str, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"--cache-dir"):
        choose_caches("/c/k", {}, {name: folder})


def test_directories_in_one_another_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        choose_caches("/c/k", {}, {"a": "/x", "b": "/x/y"})
    with pytest.raises(ConfigError, match="unknown kind of cache"):
        choose_caches("/c/k", {}, {}, only=("torch",))


def test_a_topology_is_used_on_nodes_like_the_one_it_was_found_on(tmp_path: Path) -> None:
    here = CachePlace(NCCL, os.fspath(tmp_path))
    assert topology_variables(here, "", {}) == {}
    path = os.fspath(tmp_path / "aa.xml")
    assert topology_variables(here, "aa", {}) == {"NCCL_TOPO_DUMP_FILE": path}
    write(tmp_path / "aa.xml", b"<system></system>")
    assert topology_variables(here, "aa", {}) == {"NCCL_TOPO_FILE": path}
    assert topology_variables(here, "bb", {}).keys() == {"NCCL_TOPO_DUMP_FILE"}
    assert topology_variables(here, "aa", {"NCCL_TOPO_FILE": "/mine"}) == {}


# ---- the folder --------------------------------------------------------------------------------------------


def test_the_directory_is_this_users_alone(environ: dict[str, str]) -> None:
    directory = KeyDirectory(KEY, environ)
    assert os.stat(directory.path).st_mode & 0o777 == 0o700
    assert directory.path.endswith("/" + KEY[:KEY_LETTERS])
    directory.close()


def test_two_jobs_are_not_alone(environ: dict[str, str]) -> None:
    first, second = KeyDirectory(KEY, environ), KeyDirectory(KEY, environ)
    with first.alone() as is_alone:
        assert not is_alone
    second.close()
    with first.alone() as is_alone:
        assert is_alone
    third = KeyDirectory(KEY, environ)  # the lock was made less again
    third.close()
    first.close()


def test_directories_that_nobody_uses_go(environ: dict[str, str]) -> None:
    used, unused = KeyDirectory(KEY, environ), KeyDirectory("cd" * 32, environ)
    write(Path(unused.path) / "jax" / "a")
    unused.close()
    assert remove_old(environ, older_s=3600) == []
    assert remove_old(environ, older_s=0) == [unused.path]
    assert os.listdir(os.path.dirname(used.path)) == [KEY[:KEY_LETTERS]]
    used.close()


# ---- what is read ------------------------------------------------------------------------------------------


def test_a_mark_shows_the_next_read_and_remembers_the_last(tmp_path: Path) -> None:
    assert shows_reads(os.fspath(tmp_path)), "this file system does not tell which files are read"
    path = write(tmp_path / "a", age_s=50 * HOUR_S)
    mtime_ns = path.stat().st_mtime_ns
    mark_unread(os.fspath(path), mtime_ns, 1_800_000_000)
    assert not is_read(path.stat().st_atime_ns)
    assert abs(last_use_s(path.stat().st_atime_ns) - 1_800_000_000) < HOUR_S
    path.read_bytes()
    assert is_read(path.stat().st_atime_ns)
    assert path.stat().st_mtime_ns == mtime_ns
    assert abs(last_use_s(path.stat().st_atime_ns) - time.time()) < HOUR_S


def test_capturing_is_no_use(tmp_path: Path) -> None:
    jax = place(tmp_path, "jax")
    path = write(tmp_path / "jax" / "a-cache")
    mark_all([jax])
    assert [each.is_used for each in collect([jax], {}).found] == [False]
    assert [each.is_used for each in collect([jax], {}).found] == [False]
    path.read_bytes()
    assert [each.is_used for each in collect([jax], {}).found] == [True]


def test_a_node_keeps_what_was_of_use_last(tmp_path: Path) -> None:
    jax = place(tmp_path, "jax")
    for number in range(4):
        write(tmp_path / "jax" / f"{number}-cache", bytes(100), age_s=HOUR_S * 10 * (number + 1))
    mark_all([jax])
    (tmp_path / "jax" / "3-cache").read_bytes()
    assert make_room([jax], 250) == 200
    assert sorted(os.listdir(tmp_path / "jax")) == ["0-cache", "3-cache"]


# ---- what is taken -----------------------------------------------------------------------------------------


def test_what_is_being_written_is_not_taken(tmp_path: Path) -> None:
    inductor = place(tmp_path, "inductor")
    write(tmp_path / "inductor/ab/cdone.py")
    growing = write(tmp_path / "inductor/ab/cgrow.py", age_s=0)
    write(tmp_path / "inductor/ab/.1.2.tmp")
    looks = []

    def grow(pause_s: float) -> None:
        looks.append(pause_s)
        growing.write_bytes(b"more")

    done = collect([inductor], {}, pause=grow)
    assert [each.path for each in done.found] == ["inductor/ab/cdone.py"]
    assert done.left_out == {"being written": 1}
    assert len(looks) == 1


def test_a_kernel_whose_compiler_runs_is_not_taken(tmp_path: Path) -> None:
    import fcntl

    inductor = place(tmp_path, "inductor")
    write(tmp_path / "inductor/ab/cone.main.so", elf(1000))
    lock = write(tmp_path / "inductor/locks/cone.lock", b"")
    with open(lock, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert is_locked(inductor, "ab/cone.main.so")
        assert collected(inductor) == []
    assert collected(inductor) == ["inductor/ab/cone.main.so"]


def test_halves_links_and_pipes_are_not_taken(tmp_path: Path) -> None:
    inductor = place(tmp_path, "inductor")
    write(tmp_path / "inductor/ab/chalf.so", elf(1000)[:900])
    write(tmp_path / "inductor/ab/cempty.py", b"")
    os.symlink("/etc/passwd", tmp_path / "inductor/ab/clink.py")
    os.symlink("/etc", tmp_path / "inductor/etc")
    os.mkfifo(tmp_path / "inductor/ab/cpipe.py")
    assert collected(inductor) == []


def test_an_extension_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    extensions = place(tmp_path, "extensions")
    top = tmp_path / "extensions" / "fast"
    for age_s, name, data in ((9, "main.cpp", b"int"), (8, "main.o", elf(500)), (7, "fast.so", elf(900))):
        write(top / name, data, age_s=age_s)
    write(top / "build.ninja", age_s=5)
    whole = [f"{path_prefix(extensions)}fast/{name}" for name in ("build.ninja", "fast.so", "main.cpp", "main.o")]
    assert collected(extensions) == whole
    lock = write(top / "lock")
    assert collected(extensions) == []
    lock.unlink()
    write(top / "other.o", elf(600)[:500], age_s=8)
    assert collected(extensions) == []


def test_the_same_extension_elsewhere_is_another_one(tmp_path: Path) -> None:
    assert path_prefix(CachePlace(BY_NAME["extensions"], "/a")) != path_prefix(
        CachePlace(BY_NAME["extensions"], "/b")
    )
    assert (
        path_prefix(CachePlace(BY_NAME["triton"], "/a"))
        == path_prefix(CachePlace(BY_NAME["triton"], "/b"))
        == "triton/"
    )


def test_a_group_of_tritons_is_kept_without_its_directory(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        triton = place(tmp_path / name, "triton")
        text = b'{"child_paths": {"k.cubin": "%s/ABC/k.cubin"}}' % os.fsencode(triton.path)
        write(tmp_path / name / "triton/ABC/__grp__k.json", text)
        found += collect([triton], {}).found
    assert found[0][:2] == found[1][:2]
    assert found[0].sha256 == found[1].sha256


def test_what_was_summed_is_not_read_again(tmp_path: Path) -> None:
    jax = place(tmp_path, "jax")
    path = write(tmp_path / "jax" / "a-cache")
    sums: dict = {}
    first = collect([jax], sums).found
    known = dict(sums)
    assert collect([jax], sums).found == first
    assert sums == known
    write(path, b"other", age_s=30)
    assert collect([jax], sums).found[0].sha256 != first[0].sha256


# ---- what is left by killed processes ----------------------------------------------------------------------


def test_what_killed_processes_left_goes(tmp_path: Path) -> None:
    places = [place(tmp_path, name) for name in ("inductor", "triton", "extensions")]
    kept = [
        write(tmp_path / "inductor/ab/cone.so", elf(700)),
        write(tmp_path / "inductor/locks/cone.lock", b""),
        write(tmp_path / "extensions/fast/fast.so", elf(700)),
        write(tmp_path / "triton/ABC/k.json", b"{}"),
    ]
    going = [
        write(tmp_path / "inductor/ab/chalf.so", elf(700)[:500]),
        write(tmp_path / "inductor/ab/.1.2.tmp"),
        write(tmp_path / "extensions/fast/lock", b""),
        write(tmp_path / "triton/ABC/tmp.pid_1_a/k.cubin"),
    ]
    assert set(tidy(places)) == {os.fspath(path) for path in [*going[:3], going[3].parent]}
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in going)


# ---- the key -----------------------------------------------------------------------------------------------


def test_instructions_count_and_the_kernels_words_do_not() -> None:
    flags = "fpu sse4_2 avx2 avx512f constant_tsc ibrs hypervisor md_clear amx_tile"
    text = f"processor\t: 0\nflags\t\t: {flags}\n\nflags\t: x\n"
    assert instructions(text) == ["amx_tile", "avx2", "avx512f", "fpu", "sse4_2"]
    assert instructions("Features\t: asimd sve2\n") == ["asimd", "sve2"]
    assert instructions("new_one\nflags : quite_new\n") == ["quite_new"]
    assert instructions("")


def test_every_fact_is_in_the_key() -> None:
    document = CachesDocument(
        software={"python": "1"}, compilers={}, accelerators=[], driver="", cpu=["avx"], salt=""
    )
    others = [
        CachesDocument(software={"python": "2"}, compilers={}, accelerators=[], driver="", cpu=["avx"], salt=""),
        CachesDocument(
            software={"python": "1"}, compilers={"c++": "g"}, accelerators=[], driver="", cpu=["avx"], salt=""
        ),
        CachesDocument(
            software={"python": "1"}, compilers={}, accelerators=["H"], driver="", cpu=["avx"], salt=""
        ),
        CachesDocument(software={"python": "1"}, compilers={}, accelerators=[], driver="1", cpu=["avx"], salt=""),
        CachesDocument(software={"python": "1"}, compilers={}, accelerators=[], driver="", cpu=[], salt=""),
        CachesDocument(
            software={"python": "1"}, compilers={}, accelerators=[], driver="", cpu=["avx"], salt="\udcff"
        ),
    ]
    assert len({key_of(each) for each in [document, *others]}) == 7


def test_accelerators_are_read_from_files(tmp_path: Path) -> None:
    assert read_accelerators(os.fspath(tmp_path)) == ("", [])
    write(
        tmp_path / "proc/driver/nvidia/version",
        b"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n",
    )
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        write(tmp_path / f"proc/driver/nvidia/gpus/{bus}/information", b"Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert read_accelerators(os.fspath(tmp_path)) == ("nvidia 580.65.06", ["NVIDIA H200"])


@pytest.mark.parametrize(
    ("url", "below"),
    [
        ("/envs", "/envs/caches/k"),
        ("s3://bucket/envs/", "s3://bucket/envs/caches/k"),
        ("https://host/envs?token=a/b", "https://host/envs/caches/k?token=a/b"),
        ("dir://envs::s3://bucket", "dir://envs/caches/k::s3://bucket"),
    ],
)
def test_caches_are_below_the_environment_store(url: str, below: str) -> None:
    assert _below(url, "caches/k") == below


def test_the_type_of_a_node_is_what_is_where_on_its_buses(tmp_path: Path) -> None:
    assert read_node_type(os.fspath(tmp_path)) == ""
    directory = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    write(directory / "class", b"0x030200\n")
    write(directory / "vendor", b"0x10de\n")
    first = read_node_type(os.fspath(tmp_path))
    assert len(first) == 16
    directory.rename(directory.with_name("0000:02:00.0"))
    assert read_node_type(os.fspath(tmp_path)) not in ("", first)
