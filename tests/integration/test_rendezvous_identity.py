"""The environment identity: what a rank's interpreter lists, what goes wrong, and that nothing stays behind."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.rendezvous import list_distributions
from launcher.rendezvous.identity import IdentityProbe, digest
from launcher.rendezvous.list_distributions import describe_interpreter, list_names, normalize, split_entry
from launcher.rendezvous.messages import Distributions, Identity
from tests import support
from tests.integration.rendezvous_parts import Bed


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    bed.close()


def ask(
    bed: Bed, python: str, environ: dict[str, str] | None = None, **values: float
) -> tuple[Identity, IdentityProbe]:
    told: list[Identity] = []
    probe = IdentityProbe(bed.loop, python, told.append, environ, **values)
    bed.until(lambda: told)
    bed.run_for(0.02)
    assert len(told) == 1
    return told[0], probe


def write_program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return os.fspath(path)


class TestListing:
    @pytest.mark.parametrize(
        ("entry", "expected"),
        [
            ("torch-2.13.0+cpu.dist-info", ("torch", "2.13.0+cpu")),
            ("typing_extensions-4.16.0.dist-info", ("typing-extensions", "4.16.0")),
            ("zope.interface-7.0-py3.11.egg-info", ("zope-interface", "7.0")),
            ("mine.egg-info", ("mine", "")),
            ("torch", None),
            ("notes.txt", None),
        ],
    )
    def test_entries(self, entry: str, expected: tuple[str, str] | None) -> None:
        assert split_entry(entry) == expected

    def test_names_are_one_however_they_are_written(self) -> None:
        assert normalize("Foo__Bar.-baz") == normalize("foo-bar-baz") == "foo-bar-baz"

    def test_the_first_of_a_name_counts_and_missing_directories_do_not(self, tmp_path: Path) -> None:
        for directory, name in (("a", "One-1.dist-info"), ("b", "one-2.dist-info"), ("b", "two-1.dist-info")):
            (tmp_path / directory / name).mkdir(parents=True)
        path = [os.fspath(tmp_path / directory) for directory in ("a", "none", "b")]
        assert list_names(path) == ["one==1", "two==1"]

    def test_it_agrees_with_importlib(self, bed: Bed) -> None:
        identity, probe = ask(bed, sys.executable)
        assert probe.found is not None and identity == Identity(digest(probe.found), "")
        expected: dict[str, str] = {}
        for each in importlib.metadata.distributions():
            expected.setdefault(normalize(each.metadata["Name"]), each.version)
        assert set(probe.found.names) == {f"{name}=={version}" for name, version in expected.items()}
        assert probe.found.interpreter == describe_interpreter()


class TestProbe:
    def test_the_path_is_that_of_a_rank(self, bed: Bed, tmp_path: Path) -> None:
        """PYTHONPATH counts; the folder of the script that asks does not."""
        (tmp_path / "extra-1.5.dist-info").mkdir()
        plain, _ = ask(bed, sys.executable)
        environ = {**os.environ, "PYTHONPATH": os.fspath(tmp_path)}
        more, probe = ask(bed, sys.executable, environ)
        assert probe.found is not None and "extra==1.5" in probe.found.names
        assert plain.digest != more.digest
        again, _ = ask(bed, sys.executable, {**environ, "PYTHONSAFEPATH": "1"})
        assert again.digest == more.digest

    def test_the_same_environment_has_the_same_digest(self) -> None:
        one = Distributions("3.11", ("a==1", "b==2"))
        assert digest(one) == digest(Distributions("3.11", ("a==1", "b==2")))
        assert digest(one) != digest(Distributions("3.11", ("a==1", "b==3")))
        assert digest(one) != digest(Distributions("3.12", ("a==1", "b==2")))

    def test_noise_of_the_start_is_no_part_of_the_answer(self, bed: Bed, tmp_path: Path) -> None:
        (tmp_path / "sitecustomize.py").write_text("import sys; print('hello'); print('there', file=sys.stderr)\n")
        identity, probe = ask(bed, sys.executable, {**os.environ, "PYTHONPATH": os.fspath(tmp_path)})
        assert identity.digest and probe.found is not None

    def test_secrets_do_not_reach_it(self, bed: Bed, tmp_path: Path) -> None:
        spy = write_program(tmp_path / "python", '#!/bin/sh\necho "${BOOTSEER_SECRET-none}"\nexit 3\n')
        identity, _ = ask(bed, spy, {**os.environ, "BOOTSEER_SECRET": "x" * 20})
        assert identity == Identity("", "listing its distributions: exit status 3: none")

    @pytest.mark.parametrize(
        ("program", "why"),
        [
            ("#!/bin/sh\nexit 1\n", "exit status 1: it wrote nothing"),
            ("#!/bin/sh\necho oops >&2; exit 4\n", "exit status 4: oops"),
            ("#!/bin/sh\nkill -9 $$\n", "exit status -9"),
            ("#!/bin/sh\nexec head -c 9000000 /dev/zero\n", "too much output"),
        ],
    )
    def test_an_interpreter_that_fails_is_reported(self, bed: Bed, tmp_path: Path, program: str, why: str) -> None:
        identity, probe = ask(bed, write_program(tmp_path / "python", program))
        assert identity.digest == "" and why in identity.why
        assert probe.found is None

    def test_no_interpreter_is_reported(self, bed: Bed) -> None:
        assert ask(bed, "/no/such/python")[0] == Identity(
            "", "cannot run /no/such/python: No such file or directory"
        )

    def test_one_that_hangs_is_given_up(self, bed: Bed, tmp_path: Path) -> None:
        slow = write_program(tmp_path / "python", "#!/bin/sh\nexec sleep 60\n")
        assert ask(bed, slow, patience_s=0.3)[0] == Identity(
            "", "listing its distributions: no answer within 0.3 s"
        )

    def test_it_can_be_closed_at_any_time(self, bed: Bed) -> None:
        probe = IdentityProbe(bed.loop, sys.executable, lambda _: pytest.fail("called"))
        probe.close()
        probe.close()
        bed.run_for(0.05)

    def test_it_does_not_outlive_the_launcher(self) -> None:
        """Its listing takes for ever here; then the other end of its standard input closes."""
        code = (
            "import os, runpy, time\n"
            "os.listdir = lambda path: time.sleep(60)\n"
            f"runpy.run_path({list_distributions.__file__!r}, run_name='__main__')\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdin is not None

        def is_armed() -> bool:
            fields = Path(f"/proc/{child.pid}/fdinfo/0").read_text().split()
            return bool(int(fields[fields.index("flags:") + 1], 8) & os.O_ASYNC)

        support.wait_until(is_armed, 10.0)
        child.stdin.close()
        assert child.wait(10) == -signal.SIGTERM
