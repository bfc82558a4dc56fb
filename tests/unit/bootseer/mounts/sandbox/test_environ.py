"""The variables of processes inside an image, and the names of users there."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import UsageError
from bootseer.mounts.sandbox.accounts import merge_accounts, missing_line
from bootseer.mounts.sandbox.environ import DEFAULT_PATH, LOADER, image_environ, is_of_the_node, parse_variable

CALLER = {
    "PATH": "/home/me/bin:/usr/bin", "HOME": "/home/me", "LANG": "C.UTF-8", "LD_LIBRARY_PATH": "/opt/host/lib",
    "LD_PRELOAD": "libhost.so", "PYTHONPATH": "/home/me/lib", "PYTHONHOME": "/opt/py", "VIRTUAL_ENV": "/venv",
    "CONDA_PREFIX": "/conda", "CONDA_DEFAULT_ENV": "base", "PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "WARN",
}  # fmt: skip


def inside(image: list[str], caller: dict[str, str] = CALLER, **given: str) -> dict[str, str]:
    """What a process inside has."""
    changes = image_environ(image, caller, {}, [], given)
    kept = {name: value for name, value in caller.items() if name not in changes.unset and name not in LOADER}
    return {**kept, **changes.set, **changes.loader}


def test_the_nodes_files_are_not_named() -> None:
    found = inside([])
    assert found == {
        "PATH": DEFAULT_PATH, "HOME": "/home/me", "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1", "NCCL_DEBUG": "WARN",
        "PYTHONNOUSERSITE": "1",
    }  # fmt: skip


def test_the_images_variables_are_below_the_callers() -> None:
    found = inside(
        ["PATH=/opt/py/bin", "LANG=de", "LD_LIBRARY_PATH=/opt/cuda", "CUDA_VERSION=12", "PYTHONHOME=/p", "=", "x"]
    )
    assert (found["PATH"], found["LANG"], found["CUDA_VERSION"]) == ("/opt/py/bin", "C.UTF-8", "12")
    assert (found["LD_LIBRARY_PATH"], found["PYTHONHOME"]) == ("/opt/cuda", "/p")
    assert "" not in found and "x" not in found


def test_the_users_variables_are_above_all() -> None:
    found = inside(["LANG=de"], LANG="fr", LD_PRELOAD="/x.so", PATH="/only", HOME="/elsewhere")
    assert [found[name] for name in ("LANG", "LD_PRELOAD", "PATH", "HOME")] == [
        "fr",
        "/x.so",
        "/only",
        "/elsewhere",
    ]


def test_packages_of_the_callers_home_are_for_another_python() -> None:
    assert inside([], {"PYTHONNOUSERSITE": ""})["PYTHONNOUSERSITE"] == ""
    assert inside(["PYTHONNOUSERSITE="])["PYTHONNOUSERSITE"] == ""
    assert inside([], PYTHONNOUSERSITE="")["PYTHONNOUSERSITE"] == ""


def test_accelerators_add_to_the_library_path() -> None:
    changes = image_environ(
        ["LD_LIBRARY_PATH=/a:/run/lib"], CALLER, {"NVIDIA_VISIBLE_DEVICES": "void"}, ["/run/lib", "/b"], {}
    )
    assert changes.loader == {"LD_LIBRARY_PATH": "/a:/run/lib:/b"}
    assert changes.set["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert image_environ([], {}, {}, ["/b"], {}).loader == {"LD_LIBRARY_PATH": "/b"}


names = st.sampled_from([*CALLER, "A", "B", "C"])
values = st.text(string.ascii_letters + ":/=", max_size=8)
environs = st.dictionaries(names, values, max_size=6)


@given(environs, environs, environs)
def test_every_variable_has_one_giver(
    image: dict[str, str], caller: dict[str, str], given_ones: dict[str, str]
) -> None:
    found = inside([f"{name}={value}" for name, value in image.items()], caller, **given_ones)
    for name in {*image, *caller, *given_ones} - {"LD_LIBRARY_PATH"}:
        if name in given_ones:
            wanted: str | None = given_ones[name]
        elif is_of_the_node(name):
            wanted = image.get(name, DEFAULT_PATH if name == "PATH" else None)
        else:
            wanted = caller.get(name, image.get(name))
        assert found.get(name) == wanted, name
    changes = image_environ([], caller, {}, [], given_ones)
    assert not set(changes.set) & set(LOADER) and not set(changes.unset) & set(LOADER)


def test_given_variables_are_read() -> None:
    assert parse_variable("A=b=c") == ("A", "b=c") and parse_variable("A=") == ("A", "")
    for text in ("A", "=b", "", "A\0=b"):
        with pytest.raises(UsageError, match="NAME=VALUE"):
            parse_variable(text)


def test_names_of_the_node_come_first() -> None:
    node = [
        "root:x:0:0::/root:/bin/sh",
        "me:x:1000:1000::/home/me:/bin/sh",
        "+::::::",
        "# comment",
        "also:x:1000:1::/:/",
    ]
    image = [
        "root:x:0:0:of the image:/root:/bin/sh",
        "me:x:2000:2000::/:/",
        "other:x:1000:1::/:/",
        "db:x:70:70::/db:/sbin/x",
        "bad",
    ]
    text = merge_accounts(node, image)
    assert text.splitlines() == [node[0], node[1], node[4], "db:x:70:70::/db:/sbin/x"]
    assert merge_accounts([], ["a:x:1:"]) == "a:x:1:\n"


def test_who_is_in_no_file_gets_a_line() -> None:
    fields = ("me", "x", "1000", "1000", "", "/home/me", "/bin/sh")
    assert missing_line(1000, fields, ["root:x:0:0::/root:/bin/sh"]) == ["me:x:1000:1000::/home/me:/bin/sh"]
    assert missing_line(1000, fields, ["i:x:1000:1000::/home/me:/bin/sh"]) == []
    assert missing_line(1000, ("me:x", "x", "1000"), []) == []


lines = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 4)).map(lambda each: f"{each[0]}:x:{each[1]}:"), max_size=6
)


@given(lines, lines)
def test_no_name_and_no_number_of_the_node_is_taken_by_the_image(node: list[str], image: list[str]) -> None:
    found = merge_accounts(node, image).splitlines()
    assert [line for line in found if line in node] == list(dict.fromkeys(node))
    taken = {field for line in node for field in (line.split(":")[0], line.split(":")[2])}
    for line in found:
        if line not in node:
            assert line in image and not {line.split(":")[0], line.split(":")[2]} & taken
