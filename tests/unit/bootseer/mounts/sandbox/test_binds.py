"""What of the node is seen inside an image: parsing, and the order in which it is put there."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import UsageError
from bootseer.mounts.sandbox.binds import (
    KERNEL_DIRECTORIES,
    Bind,
    UnboundPath,
    find_hiding,
    is_within,
    parse_bind,
    plan_binds,
    why_not_by_default,
)


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("/data:/mnt/data", Bind("/data", "/mnt/data")),
        ("/data:/mnt/data:ro", Bind("/data", "/mnt/data", True)),
        ("/data:/mnt/data:rw", Bind("/data", "/mnt/data")),
        ("here:/mnt//data/../x/", Bind("here", "/mnt/x")),
        ("/data", Bind("/data", "/data")),
        ("/data:ro", Bind("/data", "/data", True)),
        ("no:/root", UnboundPath("/root")),
        ("/no:/root", Bind("/no", "/root")),
    ],
)
def test_binds_are_read(text: str, bind: Bind | UnboundPath) -> None:
    assert parse_bind(text) == bind


@pytest.mark.parametrize(
    "text",
    ["", ":", "/a:", ":/a", "/a:b", "/a:/b:/c", "/a:/b:rx", "here", "/a:/", "/a:/..", "/a:/proc/x", "/a:/proc",
     "/a:/run/bootseer/rank", "no:here", "ro", "/a:/b\0", "/a\n:/b"],
)  # fmt: skip
def test_what_is_no_bind(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bind(text)
    assert "--image-bind" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "folder", ["/", "/usr", "/usr/lib/python3", "/etc", "/bin", "/opt", "/var", "/proc/1", "/dev/shm"]
)
def test_directories_that_would_hide_the_image(folder: str) -> None:
    assert why_not_by_default(folder)


@pytest.mark.parametrize(
    "folder", ["/root", "/home/me", "/opt/job", "/var/lib/me", "/jobs", "/usr/src/app", "/libs", "/tmp/x"]
)
def test_directories_of_jobs(folder: str) -> None:
    assert why_not_by_default(folder) == ""


def test_the_users_win_over_what_is_bound_anyway() -> None:
    default = [Bind("/home/me", "/home/me"), Bind("/tmp", "/tmp"), Bind("/jobs", "/jobs")]
    given = [Bind("/fast", "/tmp"), UnboundPath("/jobs"), UnboundPath("/nothing")]
    assert plan_binds(given, default) == [Bind("/home/me", "/home/me"), Bind("/fast", "/tmp")]


def test_what_an_outer_one_shows_is_left_out() -> None:
    default = [
        Bind("/home/me/job/logs", "/home/me/job/logs"),
        Bind("/home/me", "/home/me"),
        Bind("/home/me/job", "/home/me/job", is_read_only=True),
        Bind("/data/x", "/home/me/data"),
    ]
    assert plan_binds([], default) == [default[1], default[3], default[2], default[0]]


paths = st.lists(st.sampled_from(["a", "b", "c", "home", "tmp"]), min_size=1, max_size=4).map(
    lambda names: "/" + "/".join(names)
)
kernel_paths = st.sampled_from([*KERNEL_DIRECTORIES, "/dev/shm", "/sys/fs"])
binds = st.builds(Bind, paths, st.one_of(paths, kernel_paths), st.booleans())


@given(st.lists(binds, max_size=12), st.lists(binds, max_size=12))
def test_plans(given_binds: list[Bind], default: list[Bind]) -> None:
    planned = plan_binds(given_binds, default)
    targets = [bind.target for bind in planned]
    assert len(set(targets)) == len(targets)
    for place, target in enumerate(targets):
        # Outer ones first, or they would hide what was put there before.
        assert not any(is_within(earlier, target) for earlier in targets[:place])
    last = [target for target in targets if any(is_within(target, directory) for directory in KERNEL_DIRECTORIES)]
    assert targets[len(targets) - len(last) :] == last
    # Each wanted place shows what was wanted.
    wanted = {bind.target: bind for bind in [*default, *given_binds]}
    for bind in wanted.values():
        outer = max(
            (each for each in planned if is_within(bind.target, each.target)), key=lambda each: len(each.target)
        )
        assert posixpath.normpath(outer.source + bind.target.removeprefix(outer.target)) == bind.source
        assert outer.is_read_only == bind.is_read_only


def test_too_many() -> None:
    with pytest.raises(UsageError):
        plan_binds([Bind("/x", f"/x{number}") for number in range(1001)], [])


def test_what_hides_a_path() -> None:
    planned = [Bind("/root", "/root"), Bind("/x", "/root/x"), Bind("/y", "/rooted")]
    assert find_hiding("/root/x/bin/python", planned) == "/root/x"
    assert find_hiding("/root/bin/python", planned) == "/root"
    assert find_hiding("/usr/bin/python", planned) == ""
