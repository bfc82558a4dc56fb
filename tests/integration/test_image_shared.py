"""Two jobs of one node in the same image: however one ends, the other goes on with the files that both read."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from bootseer.mounts.tree_daemon.mount import list_trees, unmount_tree
from launcher.serve.metrics import expose
from launcher.serve.trees import look_at_trees
from tests.integration.image_roots import make_root
from tests.integration.job_cgroup import group, try_remove
from tests.integration.mounted_trees import Built, need_mounts
from tests.support import BOOTRUN, Program, Programs, is_running, wait_until
from tests.testing.faulty_http import FaultyHttpServer

pytestmark = pytest.mark.system
__all__ = ["group"]  # a fixture

JOIN = 'echo 0 > $0/cgroup.procs; exec "$@"'
WORK = (
    "import os, sys, time\n"
    "open('up-' + sys.argv[1], 'w').close()\n"
    "while not os.path.exists('go-' + sys.argv[1]): time.sleep(0.01)\n"
    "import decimal, xml.dom.minidom, email.mime.text\n"  # are read from the image only now
    "print(open('/etc/os-release').read())\n"
)


@pytest.fixture(scope="module")
def built() -> Iterator[Built]:
    directory = tempfile.mkdtemp(prefix="image-root-")
    os.chmod(directory, 0o755)
    make_root(directory)
    yield Built(Path(directory))
    shutil.rmtree(directory)


@pytest.fixture
def url(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    need_mounts()
    monkeypatch.setenv("BOOTSEER_RUNTIME", f"{tmp_path}/run")
    with FaultyHttpServer(built.files) as server:
        yield f"{server.url}@sha256:{built.digest}"
        unmount_tree(built.digest, force=True)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    directory = tmp_path / "jobs"
    directory.mkdir()
    (directory / "work.py").write_text(WORK)
    found = Programs(os.fspath(directory))
    yield found
    found.close()


@pytest.mark.parametrize("how", ["ends", "SIGTERM", "SIGKILL", "cgroup"])
def test_the_end_of_the_job_that_mounted_it(
    how: str, url: str, built: Built, group: Path, programs: Programs, tmp_path: Path
) -> None:
    env = {"BOOTSEER_RUNTIME": f"{tmp_path}/run", "BOOTSEER_CACHE": f"{tmp_path}/cache"}

    def start(name: str, *before: str) -> Program:
        words = ("--standalone", "--image", url, "--fork-ranks", "off", "work.py", name)
        program = programs.start(*before, BOOTRUN, *words, env=env)
        wait_until(
            lambda: os.path.exists(f"{programs.dir}/up-{name}") or program.process.poll() is not None, 60, name
        )
        assert program.process.poll() is None, program.stderr
        return program

    def daemon() -> int:
        (each,) = list_trees()
        return int(each.status["pid"])

    first = start("first", "sh", "-c", JOIN, os.fspath(group))
    served_by = daemon()
    second = start("second")
    if how == "ends":
        (Path(programs.dir) / "go-first").touch()
    elif how == "cgroup":
        (group / "cgroup.kill").write_text("1")
    else:
        first.signal(getattr(signal, how))
    status = first.wait(20).status
    assert status == {"ends": 0, "SIGTERM": 128 + signal.SIGTERM}.get(how, -signal.SIGKILL), first.stderr
    wait_until(lambda: try_remove(group), 20, "the scheduler sees the end of the job")
    assert is_running(served_by) and daemon() == served_by
    (Path(programs.dir) / "go-second").touch()
    run = second.wait(60)
    assert (run.status, "ID=made" in run.stdout) == (0, True), run.stderr
    assert "reopening the image" not in run.stderr
    assert daemon() == served_by, "and the next one finds it"
    (tree,) = asyncio.run(look_at_trees(os.environ))  # as /metrics does
    text, _ = expose("1", [], [tree])
    sums = {each.name: each.value for family in parse(text.decode()) for each in family.samples}
    assert sums["bootseer_tree_reader_wait_seconds_count"] == tree.status["blocks"]["waits"] > 0
    assert sums["bootseer_tree_store_request_seconds_count"] > 0
    assert sums["bootseer_tree_read_bytes_total"] > 0
