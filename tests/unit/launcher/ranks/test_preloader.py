"""When the preloaded process is started and with what, as seen from bootrun: what it asks the guard for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from launcher.base.loop import Loop
from launcher.cli.parser import parse
from launcher.ranks import preloader
from launcher.ranks.fork import hot_imports, import_observe
from launcher.ranks.preloader import MAX_STARTS, MORE, Preloader, PreloadSpan
from launcher.ranks.program import RankProgram, own_program
from launcher.spec import build_spec
from launcher.supervisor.client import SupervisorClient

OMP = {"OMP_NUM_THREADS": "1"}
TORCH = ("?torch", "?torch.distributed")
CULPRIT = "prints when it is imported"


class Supervisor:
    """Keeps what it is asked for."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, ...]] = []  # modules with their signs, each time
        self.environ: dict[str, str] = {}  # the last time
        self.rests: list[tuple[list[str], tuple[str, ...]]] = []  # changes, modules
        self.prepared: list[int] = []
        self.unloads = 0
        self.helped: list[str] = []
        self.answer: Callable[[], None] | None = None  # to be called when a helper has done its work

    def preload(
        self, number: int, argv: list[str], environ: dict[str, str], unset: tuple[str, ...], modules: list[str]
    ) -> None:
        self.number, self.environ = number, environ
        self.loaded.append(tuple(modules))

    def preload_rest(self, number: int, changes: list[str], modules: list[str]) -> None:
        assert number == self.number
        self.rests.append((changes, tuple(modules)))

    def prepare(self, count: int) -> None:
        self.prepared.append(count)

    def unload(self) -> None:
        self.unloads += 1

    def help(self, number: int, name: str, module: str, texts: list[str]) -> None:
        assert (number, name) == (preloader.OBSERVE, "imports")
        assert texts[1] == ""  # its files are ours
        self.helped.append(texts[0])
        if self.answer is not None:
            import_observe.observe(texts[0])
            self.answer()


class Start:
    """A bootrun with its preloader, up to the guard."""

    def __init__(self, folder: Path, *flags: str, source: str = "import torch", begins: bool = True) -> None:
        self.script = folder / "train.py"
        if not self.script.exists():
            self.script.write_text(source)
        self.environ = environ = {**OMP, "BOOTSEER_CACHE_DIR": os.fspath(folder / "cache")}
        self.spec = build_spec(
            parse(["--nproc-per-node", "2", *flags, os.fspath(self.script)], environ), environ, lambda *_: 1
        )
        self.guard = Supervisor()
        self.said: list[str] = []
        self.spans: list[PreloadSpan] = []
        self.forks: list[bool] = []  # what attempts were told
        self.folder = folder
        self.loop = Loop()
        self.preloader = Preloader(
            self.loop, cast(SupervisorClient, self.guard), self.spec, (), self.said.append, self.spans.append
        )
        self.guard.answer = self.preloader.on_helper_ended
        if begins:
            self.preloader.begin(environ)

    def settle(self, is_first: bool = True) -> list[bool]:
        """Begins an attempt."""
        self.preloader.settle(is_first, self.forks.append)
        return self.forks

    def first_step(self, listing: str, is_forked: bool = False, uses: str = "") -> None:
        """Args: uses: what imports use, as a Watch notes it, after the lines of the modules themselves."""
        events = self.folder / "rank0.jsonl"
        self.preloader.prepare(os.fspath(events))
        events.with_suffix(".imports").write_text(listing)
        modules = [line.split("\t") for line in listing.splitlines()]
        lines = [f"begun\t0\t\t0\t__main__\t{self.script}\n"]
        lines += [f"begun\t{tick}\t__main__\t1\t{name}\t{path}\n" for tick, (name, path) in enumerate(modules, 1)]
        asked = events.with_suffix(".uses")
        if asked.exists() and not asked.stat().st_size:
            asked.write_text("".join([*lines, uses, "end\n"]))
        self.preloader.first_step_seen(os.fspath(events), is_forked, os.getpid())

    def ready(self, count: int) -> None:
        self.preloader.on_ready(self.guard.number, count, [])

    def end(self, module: str, why: str, is_its_fault: bool = True) -> None:
        self.preloader.on_ended(self.guard.number, module, why, is_its_fault, not module)

    @property
    def record(self) -> hot_imports.ImportRecord | None:
        key = hot_imports.make_key(self.spec.python, "script", os.fspath(self.script))
        return hot_imports.read_record(os.fspath(self.folder / "cache" / "imports"), key)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Start]:
    return lambda *flags, **more: Start(tmp_path, *flags, **more)


def library(*names: str) -> str:
    """What a rank lists of modules of installed libraries."""
    return "".join(f"{name}\t/usr/lib/python3.11/site-packages/{name}.py\n" for name in names)


# ---- the first attempt ---------------------------------------------------------------------------------------


def test_a_ready_process_is_forked_from(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on")
    assert job.guard.loaded == [TORCH]
    assert job.settle() == []  # waits
    job.ready(900)
    assert job.forks == [True]
    assert [(span.modules, span.error, span.is_part_of_start) for span in job.spans] == [(900, "", True)]
    assert job.said == []


def test_it_begins_before_the_variables_of_caches_are_known(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", begins=False)
    program = own_program(job.spec.python)
    job.preloader.begin_early({}, lambda _: program)
    assert job.guard.loaded == [TORCH]
    job.preloader.begin({}, program._replace(environ={"TRITON_CACHE_DIR": "/caches/triton"}))
    assert job.guard.loaded == [TORCH] and job.guard.unloads == 0
    job.ready(900)
    assert job.settle() == [True]


def test_what_may_read_these_variables_is_imported_when_they_are_known(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--preload", "mylib", begins=False)
    program = own_program(job.spec.python)
    early = program._replace(environ={"TRITON_CACHE_AUTOTUNING": "1"})
    job.preloader.begin_early({}, lambda _: early)
    assert (job.guard.loaded, job.guard.rests) == ([(*TORCH, MORE)], [])
    job.preloader.begin({}, program._replace(environ={"TRITON_CACHE_DIR": "/caches/triton"}))
    changes = ["TRITON_CACHE_DIR=/caches/triton", "TRITON_CACHE_AUTOTUNING"]
    assert job.guard.rests == [(changes, (*TORCH, "!mylib"))]
    assert len(job.guard.loaded) == 1 and job.guard.unloads == 0
    job.ready(900)
    assert job.settle() == [True]


def test_what_others_have_imported_counts_where_nothing_is_recorded(start: Callable[..., Start]) -> None:
    job = start(begins=False, source="import mylib")  # nothing in it tells of torch
    job.preloader.add_stored_imports(("torch", "yaml", "no name", "yaml.nodes"))
    program = own_program(job.spec.python)
    job.preloader.begin(job.environ, program)
    assert job.guard.loaded == [(*TORCH, "~yaml", "~yaml.nodes")]
    job.ready(900)
    assert job.settle() == [True]
    job.first_step(library("torch", "yaml"), is_forked=False)
    assert job.preloader.hot_imports == ("torch", "yaml")  # what was imported here is right
    later = start(begins=False)
    later.preloader.add_stored_imports(("torch", "other"))
    later.preloader.begin(job.environ, program)
    assert later.guard.loaded == [(*TORCH, "~yaml")]


def test_the_rest_has_its_own_time(start: Callable[..., Start]) -> None:
    """Caches may be waited for longer than imports may take."""
    job = start("--fork-ranks", "on", "--preload", "mylib", "--preload-timeout", "0", begins=False)
    program = own_program(job.spec.python)
    job.preloader.begin_early({}, lambda _: program)
    job.loop.run_once(0.01)
    assert job.guard.unloads == 0
    job.preloader.begin({}, program)
    job.loop.run_once(0.01)
    assert job.guard.unloads == 1


def test_a_process_that_ends_before_the_rest_is_known(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--preload", "mylib", begins=False)
    program = own_program(job.spec.python)
    job.preloader.begin_early({}, lambda _: program)
    job.end("torch", CULPRIT)
    job.preloader.begin({}, program)
    assert job.guard.rests == [] and job.settle() == [False]


class Guessing:
    """The second start of a job whose first one had caches in `folder`."""

    def __init__(self, start: Callable[..., Start], folder: Path) -> None:
        self.folder = os.fspath(folder)
        self.environ = {"BOOTSEER_CACHE_DIR": os.fspath(folder.parent / "cache")}
        folder.mkdir()
        first = start("--fork-ranks", "on", begins=False)
        first.preloader.begin(self.environ, self.with_caches(self.folder), self.folder)
        first.ready(900)
        assert first.settle() == [True]
        first.first_step(library("torch", "torch.distributed", "yaml"), is_forked=True)
        self.job = start("--fork-ranks", "on", begins=False)

    def with_caches(self, directory: str) -> RankProgram:
        own = {"TRITON_CACHE_DIR": f"{directory}/triton"} if directory else {}
        return own_program("/usr/bin/python3")._replace(environ={"TRITON_CACHE_AUTOTUNING": "1", **own})

    def begin_early(self) -> None:
        self.job.preloader.begin_early(self.environ, self.with_caches)

    def begin(self, directory: str) -> None:
        self.job.preloader.begin(self.environ, self.with_caches(directory), directory)


@pytest.fixture
def guessing(start: Callable[..., Start], tmp_path: Path) -> Guessing:
    return Guessing(start, tmp_path / "caches")


HOT = (*TORCH, "~yaml")


def test_caches_are_taken_to_be_where_the_last_start_had_them(guessing: Guessing) -> None:
    guessing.begin_early()
    job = guessing.job
    assert job.guard.loaded == [HOT]
    assert job.guard.environ["TRITON_CACHE_DIR"] == f"{guessing.folder}/triton"
    guessing.begin(guessing.folder)
    assert job.guard.loaded == [HOT] and job.guard.unloads == 0
    job.ready(900)
    assert job.settle() == [True]


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("instead", ["/other", ""])
def test_where_they_are_elsewhere_it_begins_again(guessing: Guessing, instead: str, is_ready: bool) -> None:
    guessing.begin_early()
    job = guessing.job
    if is_ready:
        job.ready(900)
    guessing.begin(instead)
    assert job.guard.unloads == 1
    assert job.settle() == []  # not from a process that goes
    job.ready(900)  # was on its way
    assert job.forks == []
    job.end("", "it was ended by SIGTERM")
    assert job.guard.loaded == [HOT, HOT] and job.said == []
    assert job.guard.environ.get("TRITON_CACHE_DIR", "") == (f"{instead}/triton" if instead else "")
    job.ready(900)
    assert job.forks == [True]
    assert job.spans[-1].is_part_of_start  # ranks have waited for it


def test_nothing_is_guessed_of_caches_that_are_gone(guessing: Guessing) -> None:
    os.rmdir(guessing.folder)
    guessing.begin_early()
    job = guessing.job
    assert job.guard.loaded == [(*TORCH, MORE)]
    guessing.begin("/other")
    assert job.guard.rests == [(["TRITON_CACHE_DIR=/other/triton"], HOT)]
    assert len(job.guard.loaded) == 1 and job.guard.unloads == 0


def test_another_image_meanwhile(start: Callable[..., Start]) -> None:
    """What was imported is of the image that was lost."""
    job = start("--fork-ranks", "on", begins=False)
    program = own_program(job.spec.python)
    job.preloader.begin_early({}, lambda _: program)
    another = program._replace(prefix=("enter", "another"))
    job.preloader.begin_early({}, lambda _: another)
    assert job.guard.unloads == 1
    job.end("", "it was ended by SIGTERM")
    assert job.guard.loaded == [TORCH, TORCH] and job.said == []
    job.preloader.begin({}, another._replace(environ={"TRITON_CACHE_DIR": "/caches/triton"}))
    job.ready(900)
    assert job.settle() == [True]


def test_a_process_that_fails_is_no_obstacle(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--preload", "noisy")
    job.settle()
    job.end("noisy", CULPRIT)
    assert job.forks == [False]
    assert job.said == [f"noisy {CULPRIT}"]
    assert [span.error for span in job.spans] == job.said


def test_a_module_may_have_any_name(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--preload", "it")
    job.settle()
    job.end("it", CULPRIT)
    assert job.said == [f"it {CULPRIT}"]


def test_one_that_has_failed_before_it_is_needed_is_reported_once(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--preload", "noisy")
    job.end("noisy", CULPRIT)
    assert job.said == []
    assert job.settle() == [False]
    assert job.said == [f"noisy {CULPRIT}"]


def test_its_end_before_the_first_attempt(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on")
    job.ready(900)
    job.end("", "it was ended by SIGKILL")
    assert job.settle() == [False]
    assert job.said == ["the fork server has ended: it was ended by SIGKILL"]


def test_too_slow(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--preload", "slow", "--preload-timeout", "0")
    job.settle()
    job.loop.run_once(0.01)
    assert job.guard.unloads == 1
    job.end("slow", "it was stopped")
    assert job.said == ["slow was not imported within 0 s (--preload-timeout)"]
    assert job.forks == [False]


@pytest.mark.parametrize(
    ("flags", "source"),
    [
        (("--fork-ranks", "off"), "import torch"),
        (("--fork-ranks", "restarts"), "import torch"),
        ((), "print()"),
    ],
)
def test_no_process_at_time_zero(start: Callable[..., Start], flags: tuple[str, ...], source: str) -> None:
    job = start(*flags, source=source)
    assert job.settle() == [False]
    assert job.guard.loaded == [] and job.said == []


# ---- later attempts ------------------------------------------------------------------------------------------


def test_restarts_loads_after_the_first_step(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "restarts", "--max-restarts", "1")
    job.settle()
    job.preloader.attempt_started()
    job.first_step(library("torch._dynamo"))
    assert job.guard.loaded == [(*TORCH, "~torch._dynamo")]
    job.ready(900)
    job.preloader.expect_fork()
    assert job.guard.prepared == [2]
    assert job.settle(is_first=False) == [False, True]


def test_a_process_that_loads_is_waited_for(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "restarts", "--max-restarts", "1")
    job.settle()
    job.first_step(library("torch"))
    assert job.settle(is_first=False) == [False]
    job.ready(900)
    assert job.forks == [False, True]


def test_nothing_is_prepared_when_no_restart_is_left(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on")
    job.ready(900)
    job.preloader.expect_fork()
    assert job.guard.prepared == []


def test_auto_loads_later_only_for_a_framework(start: Callable[..., Start]) -> None:
    job = start("--max-restarts", "1", source="print()")
    job.preloader.attempt_started()
    job.first_step(library("numpy"))
    assert job.guard.loaded == []
    for _ in range(2):  # the first one shows that there is more, the second one is asked what that uses
        job.first_step(library("numpy", "torch"))
    assert job.guard.loaded == [(*TORCH, "~numpy")]


def test_what_the_first_step_shows_is_loaded_for_the_next(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--max-restarts", "1")
    job.ready(900)
    job.settle()
    job.first_step(library("torch._dynamo"), is_forked=True)
    assert job.guard.loaded == [TORCH, (*TORCH, "~torch._dynamo")]
    job.ready(1700)
    job.first_step(library("torch._dynamo"), is_forked=True)
    assert len(job.guard.loaded) == 2  # has it


def test_what_has_failed_is_left_out_next_time(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--preload", "noisy,json", "--max-restarts", "1")
    job.settle()
    job.end("noisy", CULPRIT)
    job.preloader.attempt_started()
    job.first_step(library("torch"))
    assert job.guard.loaded[1:] == [(*TORCH, "!json")]
    job.ready(900)
    assert job.settle(is_first=False) == [False, True]


def test_one_that_fails_while_ranks_run_is_made_again_without_the_culprit(start: Callable[..., Start]) -> None:
    """A restart may come at any time."""
    job = start("--fork-ranks", "on", "--max-restarts", "9")
    job.ready(900)
    assert job.settle() == [True]
    job.first_step(library("torch", "base", "middle", "other"))
    job.preloader.attempt_started()
    assert job.guard.loaded[1:] == [(*TORCH, "~base", "~middle", "~other")]
    job.end("base\nmiddle", "reads RANK when it is imported")
    assert job.guard.loaded[2:] == [(*TORCH, "~other")]
    job.end("other", CULPRIT)  # it may go on like this for long
    assert len(job.guard.loaded) == 3


def test_ranks_that_could_not_be_forked_mean_another_process(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--max-restarts", "9")
    job.ready(900)
    job.settle()
    job.preloader.on_exec_instead("a file has changed since it was preloaded")
    assert job.said == ["a file has changed since it was preloaded"]
    assert job.guard.unloads == 1
    job.end("", "it was stopped")
    job.first_step(library("torch"))
    assert len(job.guard.loaded) == 2


def test_a_process_that_fails_again_and_again_is_given_up(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--max-restarts", "99")
    for _ in range(MAX_STARTS + 3):
        job.end("", "it was ended by SIGKILL")
        job.first_step(library("torch"))
    assert len(job.guard.loaded) == MAX_STARTS


# ---- the next bootrun ----------------------------------------------------------------------------------------


def test_a_recorded_failure_is_left_out_by_the_next_bootrun(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on")
    job.first_step(library("torch", "hot", "noisy"))
    job.ready(900)
    job = start("--fork-ranks", "on")
    assert job.guard.loaded == [(*TORCH, "~hot", "~noisy")]
    job.end("noisy", CULPRIT)
    job = start("--fork-ranks", "on")
    assert job.guard.loaded == [(*TORCH, "~hot")]
    assert job.record is not None and job.record.dropped == {"noisy": CULPRIT}


# What has failed so far, then what the next bootrun preloads. Each failure is of another module, as if each import
# that is left out only showed the next one.
@pytest.mark.parametrize(
    ("failures", "wanted"),
    [
        (0, ("~hot", "~one", "~two", "~three", "~four", "~five")),
        (1, ("~hot", "~two", "~three", "~four", "~five")),
        (2, ("~hot",)),  # what was preloaded last, by whatever start
        (4, ("~hot",)),
        (5, None),
    ],
)
def test_a_preload_that_keeps_failing(
    start: Callable[..., Start], failures: int, wanted: tuple[str, ...] | None
) -> None:
    """Falls back to the one that was ready last, then is given up, with a line that says so at each start."""
    prove(start)
    for name in ("one", "two", "three", "four", "five")[:failures]:
        start("--fork-ranks", "auto").end(name, CULPRIT)
    job = start("--fork-ranks", "auto")
    assert job.guard.loaded == ([(*TORCH, *wanted)] if wanted else [])
    last = ("one", "two", "three", "four", "five")[failures - 1]
    text = f"preloading has failed {failures} times in a row ({last} {CULPRIT})"
    assert job.said == ([] if wanted else [text])
    assert job.settle() == ([] if wanted else [False])


def prove(start: Callable[..., Start]) -> None:
    """One start preloads `hot`, and finds that five more are imported, which nobody has preloaded yet."""
    start("--fork-ranks", "on").first_step(library("torch", "torch.distributed", "hot"))
    start("--fork-ranks", "on").ready(900)
    job = start("--fork-ranks", "on")
    job.first_step(library("torch", "torch.distributed", "hot", "one", "two", "three", "four", "five"))
    job.first_step(library("torch", "torch.distributed", "hot", "one", "two", "three", "four", "five"))


def test_one_that_is_ready_ends_a_row_of_failures(start: Callable[..., Start]) -> None:
    prove(start)
    for name in ("one", "two"):
        start("--fork-ranks", "on").end(name, CULPRIT)
    start("--fork-ranks", "on").ready(900)
    record = start("--fork-ranks", "on").record
    assert record is not None and record.failures == 0
    for name in ("three", "four", "five"):
        start("--fork-ranks", "on").end(name, CULPRIT)
    assert start("--fork-ranks", "on").guard.loaded != []  # three in a row


def test_what_the_user_names_counts_for_no_row_of_failures(start: Callable[..., Start]) -> None:
    prove(start)
    for _ in range(6):
        start("--fork-ranks", "on", "--preload", "noisy").end("noisy", CULPRIT)
    record = start("--fork-ranks", "on").record
    assert record is not None and record.failures == 0


def test_a_failure_is_reported_with_what_imports_the_culprit(start: Callable[..., Start]) -> None:
    """All are left out at once."""
    job = start("--fork-ranks", "on")
    job.first_step(library("torch", "torch.distributed", "base", "middle", "top", "other"))
    job = start("--fork-ranks", "on")
    job.end("base\nmiddle\ntop", "reads RANK when it is imported")
    later = start("--fork-ranks", "on")
    assert later.guard.loaded == [(*TORCH, "~other")]
    assert later.record is not None
    assert later.record.dropped == {
        "base": "reads RANK when it is imported",
        "middle": "imports base, which reads RANK when it is imported",
        "top": "imports base, which reads RANK when it is imported",
    }


def test_what_the_user_names_is_tried_each_time(start: Callable[..., Start]) -> None:
    """It may have been mended, or just been killed; and if not, one line says why ranks are exec'd again."""
    for _ in range(2):
        job = start("--fork-ranks", "on", "--preload", "noisy")
        assert job.guard.loaded == [(*TORCH, "!noisy")]
        job.settle()
        job.end("noisy", CULPRIT)
        assert job.said == [f"noisy {CULPRIT}"]


@pytest.mark.parametrize("is_ready", [False, True])
def test_what_has_ended_is_named_also_while_it_imports_nothing(
    start: Callable[..., Start], is_ready: bool
) -> None:
    job = start("--fork-ranks", "on")
    if is_ready:
        job.ready(2)
    job.end("", "it was ended by SIGKILL", is_its_fault=False)
    assert job.settle() == [False]
    assert job.said == ["the fork server has ended: it was ended by SIGKILL"]


def test_a_framework_is_not_held_at_fault_for_a_killed_process(start: Callable[..., Start]) -> None:
    """Out of memory once, or kill -9, must not cost a week of preloading."""
    job = start("--fork-ranks", "on")
    job.settle()
    job.end("torch", "was being imported when the process was ended by SIGKILL", False)
    assert start("--fork-ranks", "on").guard.loaded == [TORCH]


@pytest.mark.parametrize("is_its_fault", [False, True])
def test_one_that_was_killed_while_ranks_run_is_there_again_for_a_restart(
    start: Callable[..., Start], monkeypatch: pytest.MonkeyPatch, is_its_fault: bool
) -> None:
    monkeypatch.setattr(preloader, "AGAIN_S", 0.0)
    job = start("--fork-ranks", "on", "--max-restarts", "3")
    job.ready(900)
    job.preloader.attempt_started()
    job.end("", "it was ended by SIGKILL", is_its_fault)
    assert len(job.guard.loaded) == 1, "not at once"
    job.loop.run_once(0.01)
    assert len(job.guard.loaded) == (1 if is_its_fault else 2)
    if not is_its_fault:
        job.ready(900)
    assert job.settle(is_first=False) == [not is_its_fault]


def test_one_that_was_killed_before_a_restart_leaves_the_ranks_alone(
    start: Callable[..., Start], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preloader, "AGAIN_S", 0.0)
    job = start("--fork-ranks", "on", "--max-restarts", "3")
    job.ready(900)
    job.preloader.attempt_started()
    job.end("", "it was ended by SIGKILL", is_its_fault=False)
    assert job.settle(is_first=False) == [False]
    job.loop.run_once(0.01)
    assert len(job.guard.loaded) == 1
    job.first_step(library("hot"))
    assert len(job.guard.loaded) == 2


def test_nothing_is_loaded_for_restarts_that_cannot_be(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "restarts")
    job.preloader.attempt_started()
    job.first_step(library("torch"))
    assert job.guard.loaded == []


def test_news_of_an_earlier_process_is_not_taken_for_that_of_the_present_one(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on", "--max-restarts", "1")
    job.ready(900)
    first = job.guard.number
    job.first_step(library("torch._dynamo"), is_forked=True)
    assert job.guard.number != first
    job.preloader.on_ended(first, "", "it was stopped", False, True)
    job.ready(1700)
    assert job.settle(is_first=False) == [True]


def test_an_edited_script_is_another_job(start: Callable[..., Start]) -> None:
    job = start("--fork-ranks", "on")
    job.first_step(library("hot"))
    job.script.write_text("import torch  # edited")
    assert start("--fork-ranks", "on").guard.loaded == [TORCH]


def test_a_record_decides_what_the_text_does_not_show(start: Callable[..., Start]) -> None:
    start(source="import mine").first_step(library("torch"))
    assert start().guard.loaded == [TORCH]
