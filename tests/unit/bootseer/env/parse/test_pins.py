"""Which packages would be others another day, told from what was installed and from what set-up was given."""

from __future__ import annotations

import pytest

from bootseer.env.parse.pins import InstalledPackage, find_unpinned


def package(name: str, version: str = "1.0", asked: bool | None = None, **more: object) -> InstalledPackage:
    fields: dict[str, object] = {"is_local": False, "is_folder": False, "source": "", "needs": ()}
    return InstalledPackage(name, version, asked, **(fields | more))  # type: ignore[arg-type]


OWN = package("mine", "0.1", True, is_local=True, is_folder=True, needs=("Num_Py", "yaml"))
UV_LOCK = '[[package]]\nname = "num-py"\nversion = "2.1"\nsource = { registry = "x" }\n'


@pytest.mark.parametrize(
    ("packages", "texts", "expected"),
    [
        ([package("a", "2.13.0", True)], ["pip install a==2.13.0"], []),
        ([package("a", "2.13.0", True)], ["pip install a>=2"], ["a 2.13.0"]),
        ([package("a", "2.13.0", True)], ["pip install a==2.13.*", "b==2.13.0", "xa==2.13.0"], ["a 2.13.0"]),
        ([package("A_b.c", "1.0.0", True)], ["a-b-c[extra] == 1.0"], []),
        ([package("a", "1.0+cu128", True)], ["a===1.0+cu128 --hash=sha256:00"], []),
        # What a pinned one brings is not looked at: pip says so of each, of uv it is what others need.
        ([package("a", "1", True), package("b", "3", False)], ["a==1"], []),
        ([package("a", "1", None, needs=("b",)), package("b", "3", None)], ["a==1"], []),
        ([package("a", "1", None), package("b", "3", None)], ["a==1"], ["b 3"]),
        # What the user's own package needs is the user's choice.
        ([OWN, package("num-py", "2.1", False), package("yaml", "6", False)], [], ["num-py 2.1", "yaml 6"]),
        ([OWN, package("num-py", "2.1", False), package("yaml", "6", False)], [UV_LOCK, "yaml==6"], []),
        ([OWN._replace(is_folder=False), package("num-py", "2.1", False)], [], []),
        # A group that includes another one, or a name that is spelled otherwise, is no matter of text.
        (
            [package("dev-tool", "5", True)],
            ['dev = [{include-group = "base"}]\nbase = ["Dev_Tool"]'],
            ["dev-tool 5"],
        ),
        ([package("a", "1", True, source="ab" * 20)], ["git+https://h/a@" + "ab" * 20], []),
        ([package("a", "1", True, source="ab" * 20)], ["git+https://h/a@main"], ["a 1"]),
        ([package("a", "1", True)], ["dependencies:\n  - conda-forge::a=1=py_0\n"], []),
    ],
)
def test_what_is_not_pinned(packages: list[InstalledPackage], texts: list[str], expected: list[str]) -> None:
    assert find_unpinned(packages, texts) == expected
