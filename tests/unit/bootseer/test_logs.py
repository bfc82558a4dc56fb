"""Where lines of the library go, and what a user of it sees without any configuration."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import pytest

from bootseer.log_handler import LineHandler
from bootseer.logs import get_logger, send_to, sent_to

LOG = get_logger("bootseer.test_logs")


def test_levels_are_prefixes(said: list[str]) -> None:
    LOG.info("found %s", "it")
    LOG.warning("100%% of %s", "it")
    LOG.info("100% of it")
    assert said == ["found it", "warning: 100% of it", "100% of it"]


@pytest.mark.parametrize("line", ["plain, 100 %s", "warning: of %d", "error: it", "warning:", "no warning: it"])
def test_a_line_that_was_made_elsewhere_stays(said: list[str], line: str) -> None:
    LOG.line(line)
    assert said == [line]


def test_a_module_that_is_run_as_a_program_has_the_same_destination(said: list[str]) -> None:
    """Its name is `__main__`; the services of checkpoints and images are such modules."""
    get_logger("__main__").warning("it")
    assert said == ["warning: it"]


def test_level_and_place_are_right(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    LOG.line("warning: it")
    LOG.line("it")
    LOG.warning("it")
    found = [(each.levelno, each.getMessage(), each.funcName, each.name) for each in caplog.records]
    place = ("it", "test_level_and_place_are_right", "bootseer.test_logs")
    assert found == [(logging.WARNING, *place), (logging.INFO, *place), (logging.WARNING, *place)]


def test_the_innermost_gets_the_line_and_once(said: list[str]) -> None:
    inner: list[str] = []
    root: list[str] = []
    handler = LineHandler(root.append)
    logging.getLogger().addHandler(handler)
    try:
        with sent_to(inner.append):
            LOG.warning("inner")
        LOG.info("outer")
        send_to(None)
        LOG.warning("the user's")
    finally:
        logging.getLogger().removeHandler(handler)
    assert (inner, said, root) == (["warning: inner"], ["outer"], ["warning: the user's"])


def test_an_error_of_the_writer_is_the_callers(said: list[str]) -> None:
    def fail(_: str) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError), sent_to(fail):
        LOG.info("it")
    LOG.info("again")
    assert said == ["again"]


def test_no_line_is_lost_or_sent_twice_while_the_destination_changes(said: list[str]) -> None:
    other: list[str] = []
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            send_to(other.append)
            send_to(said.append)

    thread = threading.Thread(target=change)
    thread.start()
    for number in range(2000):
        LOG.info("%d", number)
    is_over.set()
    thread.join()
    assert sorted([*said, *other]) == sorted(map(str, range(2000)))


BASIC = "import logging; logging.basicConfig(format='%(name)s %(message)s')"


@pytest.mark.parametrize(
    ("before", "after", "printed"),
    [
        ("", "", ""),
        (BASIC, "", "bootseer.a it\n"),
        (BASIC, "logs.send_to(lambda line: print(line, file=sys.stderr))", "warning: it\n"),
        ("", "logs.send_to(lambda line: print(line, file=sys.stderr))", "warning: it\n"),
    ],
    ids=["nothing", "the user", "both", "the program"],
)
def test_what_is_printed_is_what_was_configured(before: str, after: str, printed: str) -> None:
    code = f"import sys\nfrom bootseer import logs\n{before}\n{after}\nlogs.get_logger('bootseer.a').warning('it')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("", printed)


def test_a_warning_that_has_to_be_seen_is_printed() -> None:
    code = "from bootseer.logs import get_logger; get_logger('bootseer.a', prints=True).warning('it')"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("", "it\n")


def test_only_a_line_with_a_reader_imports_logging() -> None:
    code = (
        "import sys; from bootseer import logs; log = logs.get_logger('bootseer.a'); log.warning('no reader')\n"
        "logs.send_to(print); before = 'logging' in sys.modules\n"
        "log.info('it'); print(before, 'logging' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("it\nFalse True\n", "")
