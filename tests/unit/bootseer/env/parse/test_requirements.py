"""Requirement files and set-up commands: what is pinned, what they name, and that no text makes them fail."""

from __future__ import annotations

import codecs
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bootseer.env.parse import requirements
from bootseer.env.parse.command_words import CommandInputs, NamedPath, read_command
from bootseer.env.parse.manifests import parse_conda_environment, parse_conda_list, parse_pyproject
from bootseer.env.parse.requirements import (
    LocalPackage,
    RequestedPackage,
    Requirements,
    decode_text,
    parse_requirements,
    unpinned,
)
from bootseer.env.parse.shell_words import parse_line
from bootseer.errors import KeyUnknown

LINUX = {
    "sys_platform": "linux",
    "python_version": "3.11",
    "python_full_version": "3.11.7",
    "platform_machine": "x86_64",
}
HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("line", "is_pinned"),
    [
        ("a==1.0", True),
        ("a == 1.0", True),
        ("a===1.0+local", True),
        ("a[x,y]==1.0 ; python_version >= '3.8'", True),
        ("a==1.0,!=1.1", True),
        (f"a --hash=sha256:{HEX}", True),
        (f"a==1.0 --hash=sha256:{HEX} --hash sha256:{HEX}", True),
        (f"a @ https://h/a-1.whl#sha256={HEX}", True),
        (f"https://h/a-1-py3-none-any.whl#sha256={HEX}", True),
        (f"a @ git+https://h/a@{HEX[:40]}", True),
        (f"git+https://h/a@{HEX[:40]}#egg=a", True),
        ("a", False),
        ("a==1.*", False),
        ("a>=1,<2", False),
        ("a~=1.0", False),
        ("a!=1.0", False),
        ("a @ https://h/a-1.whl", False),
        ("https://h/a-1-py3-none-any.whl", False),
        ("git+https://h/a@main", False),
        (f"git+https://h/a@{HEX[:12]}", False),
        ("a b c", False),
        ("a==", False),
        ("-e git+https://h/a@main#egg=a", False),
    ],
)
def test_what_is_pinned(line: str, is_pinned: bool) -> None:
    named = parse_requirements(line)
    assert [each.is_pinned for each in named.wanted] == [is_pinned]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("./wheels/a-1-py3-none-any.whl", LocalPackage("./wheels/a-1-py3-none-any.whl")),
        ("a-1-py3-none-any.whl", LocalPackage("a-1-py3-none-any.whl")),
        ("a-1.tar.gz", LocalPackage("a-1.tar.gz")),
        (".", LocalPackage(".")),
        (".[dev,test]", LocalPackage(".", ("dev", "test"))),
        ("../other", LocalPackage("../other")),
        ("file:///srv/a.whl", LocalPackage("/srv/a.whl")),
        ("a @ file:///srv/a%20b.whl", LocalPackage("/srv/a b.whl")),
        ("file://localhost/srv/a.whl", LocalPackage("/srv/a.whl")),
        ("-e .", LocalPackage(".", (), True)),
        ("-e src/pkg[x]", LocalPackage("src/pkg", ("x",), True)),
        ("--editable=./a", LocalPackage("./a", (), True)),
        ("-e file:///srv/a", LocalPackage("/srv/a", (), True)),
    ],
)
def test_what_is_local(line: str, expected: LocalPackage) -> None:
    named = parse_requirements(line)
    assert named.locals == (expected,)
    assert named.wanted == ()


def test_a_whole_file() -> None:
    text = (
        "# a comment\r\n"
        "--index-url https://h/simple  # with a comment\n"
        "-r base.txt\n"
        "--requirement=more.txt\n"
        "-cconstraints.txt\n"
        "-f ./wheels\n"
        "a==1.0 \\\n"
        f"    --hash=sha256:{HEX} \\\n"
        "    # a comment between\n"
        "b ; sys_platform == 'win32'\n"
        "c>=1 ; python_version > '3.0'\n"
        "d==${VERSION}\n"
        "\n"
        "e  # not pinned\n"
        "f @ https://h/f.whl#subdirectory=x"
    )
    named = parse_requirements(text, {"VERSION": "2.0"}, LINUX)
    assert named.requirement_files == ("base.txt", "more.txt")
    assert named.constraint_files == ("constraints.txt",)
    assert named.find_links == ("./wheels",)
    assert named.variables == ("VERSION",)
    assert [each.name for each in named.wanted] == ["a", "c", "d", "e", "f"]
    assert unpinned(named.wanted) == ["c>=1 ; python_version > '3.0'", "e", "f @ https://h/f.whl#subdirectory=x"]
    assert unpinned(named.wanted, {"c", "e", "f"}) == []
    assert unpinned([RequestedPackage("a", "a", False), RequestedPackage("a", "a==1", True)]) == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_byte_order_marks(encoding: str) -> None:
    mark = {
        "utf-8": codecs.BOM_UTF8,
        "utf-16-le": codecs.BOM_UTF16_LE,
        "utf-16-be": codecs.BOM_UTF16_BE,
        "utf-32-le": codecs.BOM_UTF32_LE,
        "utf-32-be": codecs.BOM_UTF32_BE,
    }[encoding]
    assert decode_text(mark + "naïve==1".encode(encoding)) == "naïve==1"


def test_other_encodings() -> None:
    assert decode_text(b"# -*- coding: latin-1 -*-\n# caf\xe9") == "# -*- coding: latin-1 -*-\n# café"
    assert decode_text(b"# coding: nonsense\na") == "# coding: nonsense\na"
    assert decode_text(b"# caf\xe9") == "# café"


@given(st.binary(max_size=200))
def test_no_bytes_make_it_fail(data: bytes) -> None:
    text = decode_text(data)
    for named in (parse_requirements(text, {}, LINUX), parse_conda_environment(text), parse_conda_list(text)):
        assert isinstance(named, Requirements)
    assert isinstance(parse_pyproject(text), Requirements)


names = st.from_regex(r"[a-z][a-z0-9]{0,6}", fullmatch=True)
versions = st.from_regex(r"[0-9]{1,2}(\.[0-9]{1,2}){0,2}", fullmatch=True)


@given(st.lists(st.tuples(names, versions), max_size=6, unique_by=lambda pair: pair[0]), names)
def test_pinned_files_are_pinned_and_one_line_more_is_reported(pairs: list[tuple[str, str]], more: str) -> None:
    text = "\n".join(f"{name}=={version}" for name, version in pairs)
    assert unpinned(parse_requirements(text).wanted) == []
    expected = [] if more in dict(pairs) else [f"{more}>=1"]
    assert unpinned(parse_requirements(f"{text}\n{more}>=1").wanted) == expected


@given(st.from_regex(requirements._PINNED, fullmatch=True))
def test_what_is_plainly_pinned_is_as_packaging_says(line: str) -> None:
    found = Requirement(line)
    assert (found.marker, found.url, found.extras, str(found.specifier)[:2]) == (None, None, set(), "==")
    assert parse_requirements(line).wanted == (RequestedPackage(canonicalize_name(found.name), line, True),)


def test_lock_files_are_read_without_packaging() -> None:
    code = """
import sys
from bootseer.env.parse.requirements import parse_requirements
found = parse_requirements("Torch==2.13.0+cpu --hash=sha256:00\\nruamel.yaml==0.66b2 # why\\n").wanted
assert [each.name for each in found] == ["torch", "ruamel-yaml"]
sys.exit("packaging" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pyproject() -> None:
    text = """
[project]
dependencies = ["a==1", "b>=2", "c; sys_platform=='win32'"]
optional-dependencies = {dev = ["d"], test = ["e==1"]}
[dependency-groups]
docs = ["f", {include-group = "other"}]
"""
    named = parse_pyproject(text, ["dev"], ["docs"], LINUX)
    assert unpinned(named.wanted) == ["b>=2", "d", "f"]
    assert unpinned(parse_pyproject(text, groups=["docs"], has_dependencies=False).wanted) == ["f"]
    dynamic = parse_pyproject("[project]\ndynamic = ['dependencies']")
    assert unpinned(dynamic.wanted) == ["dependencies that the project computes"]


def test_conda_files() -> None:
    text = """
name: x
channels:
  - conda-forge
dependencies:
  - python=3.11          # a patch level is open
  - numpy=1.26.4=py311_0
  - conda-forge::scipy==1.12.0
  - pip
  - pip:
    - a==1.0
    - b
    - -r more.txt
variables:
  A: b
"""
    named = parse_conda_environment(text)
    assert unpinned(named.wanted) == ["python=3.11", "pip", "b"]
    assert named.requirement_files == ("more.txt",)
    assert parse_conda_environment("dependencies: [a, b]").notes != ()
    assert unpinned(parse_conda_list("a=1.0=x_0\nb\nc 1.0 x_0\nd=1.*").wanted) == ["b", "d=1.*"]
    assert unpinned(parse_conda_list("# made by conda\n@EXPLICIT\nhttps://h/a-1.0-0.conda").wanted) == []


# ---- commands ----------------------------------------------------------------------------------------------


def read(command: str, **environ: str) -> CommandInputs:
    return read_command(command, {"HOME": "/home/me", **environ}, "/job", LINUX)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pip install a", ["a"]),
        ("pip3.11 install -U 'a>=1' b==1", ["a>=1"]),
        ("python -m pip install --quiet --target /x a", ["a"]),
        ("/venv/bin/python3 -u -m pip --no-input install a", ["a"]),
        ("pip install --index-url https://h/ --no-deps -i x a==1", []),
        ("PIP_NO_CACHE_DIR=1 pip install a", ["a"]),
        ("env -u X A=1 pip install a", ["a"]),
        ("sudo -E nice -n 19 timeout 60 pip install a", ["a"]),
        ("true && pip install a || pip install b; (pip install c)", ["a", "b", "c"]),
        ("if true; then pip install a; fi", ["a"]),
        ("sh -c 'pip install a'", ["a"]),
        ('bash -lc "pip install a==1 && pip install b"', ["b"]),
        ("uv pip install --python /x --torch-backend cpu a", ["a"]),
        ("uv add a", ["a"]),
        ("V=1.0; pip install a==$V", []),
        ("export V=1.0 && pip install a==${V}", []),
        ("pip install a==$VERSION", []),
        ("conda install -y -c conda-forge numpy=1.26 scipy==1.0 'a=1=b'", ["numpy=1.26"]),
        ("micromamba create -n x python=3.11.7", ["python=3.11.7"]),
        ("pip uninstall -y a", []),
        ("pip --version; pip list", []),
        ("pip install a==1 2>&1 > log.txt # pip install b", []),
        ("git clone https://h/r", ["downloads by git"]),
        ("pip install -r https://h/requirements.txt", ["https://h/requirements.txt"]),
        ("pip install 'a; sys_platform == \"win32\"'", []),
    ],
)
def test_packages_that_commands_name(command: str, expected: list[str]) -> None:
    found = read(command, VERSION="2.0")
    assert unpinned(found.wanted) == expected
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("pip install -r requirements.txt", [NamedPath("requirements", "/job/requirements.txt")]),
        ("pip install -rrequirements.txt -c /c.txt", None),
        ("cd sub && pip install -r r.txt", [NamedPath("requirements", "/job/sub/r.txt")]),
        ("cd ~ && pip install -r r.txt", [NamedPath("requirements", "/home/me/r.txt")]),
        ("(cd sub; cd ..; pip install -r r.txt)", [NamedPath("requirements", "/job/r.txt")]),
        ("pip install .", [NamedPath("local", "/job")]),
        ("pip install -e '.[dev]'", [NamedPath("local", "/job", ("dev",), (), True)]),
        ("pip install --no-deps ./a.whl", [NamedPath("local", "/job/a.whl", has_dependencies=False)]),
        ("pip install --find-links wheels a==1", [NamedPath("find-links", "/job/wheels")]),
        ("pip install --find-links https://h/ a==1", []),
        ("uv pip sync lock.txt", [NamedPath("requirements", "/job/lock.txt")]),
        ("uv sync --frozen --group g", [NamedPath("project", "/job", (), ("g",), True, lock="uv.lock")]),
        ("uv sync --project p", [NamedPath("project", "/job/p", (), (), True, lock="uv.lock")]),
        (
            "pip install --group dev",
            [NamedPath("requirements", "/job/pyproject.toml", (), ("dev",), False, False)],
        ),
        ("conda env create -f env.yml", [NamedPath("conda-environment", "/job/env.yml")]),
        ("conda env update", [NamedPath("conda-environment", "/job/environment.yml")]),
        ("conda create -n x --file list.txt", [NamedPath("conda-list", "/job/list.txt")]),
        (". /venv/bin/activate && pip install -r 'a b.txt'", [NamedPath("requirements", "/job/a b.txt")]),
        ("uv pip install -r pyproject.toml --extra x", [NamedPath("requirements", "/job/pyproject.toml", ("x",))]),
    ],
)
def test_files_that_commands_name(command: str, expected: list[NamedPath] | None) -> None:
    if expected is None:
        expected = [NamedPath("requirements", "/job/requirements.txt"), NamedPath("constraints", "/c.txt")]
    found = read(command)
    assert list(found.sources) == expected
    assert found.unknown == ()


@pytest.mark.parametrize(
    ("command", "program", "script"),
    [
        ("./setup.sh --all", "setup.sh", "/job/setup.sh"),
        ("sh -e tools/setup.sh", "setup.sh", "/job/tools/setup.sh"),
        ("python -X dev setup.py install", "setup.py", "/job/setup.py"),
        ("source ./prepare", "prepare", "/job/prepare"),
        ("make deps", "make", ""),
        ("python -c 'import x'", "python -c", ""),
        ("python -m mytool", "python -m mytool", ""),
        ("$TOOL install", "a program whose name the shell computes", ""),
        ("pip install $(cat list)", "arguments of an installer that the shell computes", ""),
        ("pip install $UNSET", "arguments of an installer that the shell computes", ""),
        ("pip install *.whl", "arguments of an installer that the shell computes", ""),
        ("for p in a b; do pip install $p; done", "shell syntax other than simple commands", ""),
        ("pip install 'a", "shell syntax other than simple commands", ""),
        ("cat <<EOF\nx\nEOF", "shell syntax other than simple commands", ""),
    ],
)
def test_programs_of_which_nothing_is_known(command: str, program: str, script: str) -> None:
    found = read(command)
    assert program in found.unknown
    assert [source.path for source in found.sources if source.kind == "script"] == ([script] if script else [])


def test_variables_that_commands_read() -> None:
    found = read("pip install a==$A \"b==${B:-1}\" '$C' https://$USER@h/$D\\$E")
    assert found.variables == ("A", "B", "USER", "D")


@given(st.text("abc $'\"\\`(){}<>&|;#\n=-*~!", max_size=40))
def test_no_line_makes_the_shell_parser_fail(line: str) -> None:
    parse_line(line, {"a": "b"})
    assert isinstance(read(f"pip install {line}"), CommandInputs)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6), max_size=5)
)
def test_quoted_words_are_read_as_they_are(words: list[str]) -> None:
    import shlex

    line = parse_line("run " + " ".join(map(shlex.quote, words)), {})
    assert [word.text for word in line.commands[0].words] == ["run", *words]
    assert line.is_certain


@pytest.mark.parametrize("line", ["a>=1", "a==1; python_version >= '3.8'", "a @ https://h/a.whl"])
def test_without_packaging_nothing_is_known(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bootseer alone, as `pip install bootseer` gives it: set-up is run then, and not kept."""
    monkeypatch.setitem(sys.modules, "packaging", None)
    with pytest.raises(KeyUnknown, match=r"bootseer\[env\]"):
        parse_requirements(line, {}, LINUX)
    assert parse_requirements("a==1.0", {}, LINUX).wanted, "what is pinned is read without it"


@pytest.mark.parametrize(
    ("command", "is_plain"),
    [
        ("pip install -r r.txt", True),
        ("python3 -m pip install a==1", True),
        ("mkdir -p x && pip install a", True),
        ("[ -f more.txt ] && pip install -r more.txt", False),
        ("test -d vendor || pip install a", False),
        ("uv pip install -r r.txt", False),
        ("python -m uv pip install a", False),
        ("conda install a", False),
    ],
)
def test_what_looks_names_up_is_seen_in_full(command: str, is_plain: bool) -> None:
    assert read_command(command, {}, "/work").is_plain is is_plain


@pytest.mark.parametrize(
    ("command", "only_installs"),
    [
        ("pip install -r r.txt 'a>=1' 2>&1", True),
        ("cd x && pip install a >/dev/null", True),
        ("pip install a > log.txt", False),
        ("pip freeze > r.txt && pip install -r r.txt", False),
        ("pip download -d links a && pip install --find-links links a", False),
        ("pip wheel a", False),
        ("pip install --target lib a", False),
        ("pip install -tlib a", False),
        ("pip install -e git+https://example.org/a#egg=a", False),
        ("pip install git+https://example.org/a", False),
        ("mkdir links && pip install a", False),
    ],
)
def test_commands_that_only_install(command: str, only_installs: bool) -> None:
    assert read_command(command, {}, "/work").only_installs is only_installs
