"""What warming came to: words, records, and what another process says of it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.linux.locks import try_lock
from launcher.warm import warm_record
from launcher.warm.results import (
    CACHED,
    ENV,
    FAILED,
    IMAGE,
    IN_PLACE,
    NOTHING,
    STAGES,
    Warmed,
    exit_status,
    from_record,
    line,
    to_record,
)

WARMED = st.builds(
    Warmed,
    stage=st.sampled_from(STAGES),
    how=st.text(max_size=10),
    what=st.text(max_size=100),
    size_bytes=st.integers(0, 1 << 50),
    fetched_bytes=st.integers(0, 1 << 50),
    took_s=st.floats(0, 1e6),
    text=st.text(max_size=100),
)


@given(WARMED)
def test_records_go_through_json(warmed: Warmed) -> None:
    assert from_record(json.loads(json.dumps(to_record(warmed)))) == warmed


@pytest.mark.parametrize(
    "change",
    [
        {"stage": "gpu"},
        {"stage": 3},
        {"how": None},
        {"size_bytes": -1},
        {"took_s": "long"},
        {"fetched_bytes": True},
        {"took_s": float("nan")},
    ],
)
def test_anything_else_is_no_record(change: dict[str, object]) -> None:
    assert from_record({**to_record(Warmed(IMAGE, CACHED)), **change}) is None


def test_lines_for_people() -> None:
    assert line(Warmed(IMAGE, CACHED, "d", 2_000_000, 1_000_000, 1.5)) == (
        "image: cached, 2 MB, 1 MB of it fetched in 1.5 s"
    )
    assert line(Warmed(ENV, IN_PLACE, "d", text="/venv")) == "env: there (/venv)"
    assert line(Warmed(ENV, NOTHING, text="the store does not have it")) == "env: the store does not have it"
    assert line(Warmed(ENV, FAILED, text="no such file")) == "env: not warmed: no such file"
    assert exit_status([Warmed(IMAGE, CACHED), Warmed(ENV, NOTHING)]) == 0
    assert exit_status([Warmed(IMAGE, CACHED), Warmed(ENV, FAILED)]) == 1


# ---- what the next start is told -----------------------------------------------------------------------------


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"BOOTSEER_CACHE": os.fspath(tmp_path / "cache")}


def test_a_start_finds_what_it_was_warmed_with(environ: dict[str, str]) -> None:
    image, env = Warmed(IMAGE, CACHED, "a" * 64, 5, 5), Warmed(ENV, IN_PLACE, "b" * 64)
    warm_record.write([image, Warmed(ENV, FAILED, "c" * 64)], environ, now_s=100.0)
    warm_record.write([env], environ, now_s=200.0)
    wanted = [(IMAGE, "a" * 64), (ENV, "b" * 64), (ENV, "c" * 64)]
    assert warm_record.find(wanted, environ) == [(image, 100.0), (env, 200.0)]
    warm_record.write([image._replace(fetched_bytes=0)], environ, now_s=300.0)
    assert warm_record.find(wanted[:1], environ) == [(image._replace(fetched_bytes=0), 300.0)]


def test_two_that_write_at_once_lose_nothing(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins when the first has read, and has not written."""
    real, seconds = warm_record._read, list[threading.Thread]()

    def read(directory: str) -> list[dict[str, Any]]:
        found = real(directory)
        if not seconds:
            seconds.append(
                threading.Thread(target=warm_record.write, args=([Warmed(IMAGE, CACHED, "b")], environ))
            )
            seconds[0].start()
            seconds[0].join(0.2)  # it ends if nothing holds it up
        return found

    monkeypatch.setattr(warm_record, "_read", read)
    warm_record.write([Warmed(IMAGE, CACHED, "a")], environ)
    seconds[0].join()
    assert len(warm_record.find([(IMAGE, "a"), (IMAGE, "b")], environ)) == 2


def test_a_writer_that_hangs_holds_up_no_other_for_long(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_record.write([Warmed(IMAGE, CACHED, "a")], environ)
    monkeypatch.setattr(warm_record, "LOCK_S", 0.01)
    with open(os.path.join(environ["BOOTSEER_CACHE"], warm_record.LOCK_NAME), "r+b") as file:
        assert try_lock(file.fileno(), 0)
        warm_record.write([Warmed(IMAGE, CACHED, "b")], environ)
    assert len(warm_record.find([(IMAGE, "a"), (IMAGE, "b")], environ)) == 2


def test_it_does_not_grow_for_ever(environ: dict[str, str]) -> None:
    for number in range(warm_record.MAX_ENTRIES + 10):
        warm_record.write([Warmed(IMAGE, CACHED, str(number))], environ, now_s=float(number))
    assert warm_record.find([(IMAGE, "9")], environ) == []
    last = str(warm_record.MAX_ENTRIES + 9)
    assert len(warm_record.find([(IMAGE, last)], environ)) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"v":2,"entries":[]}', '{"v":1,"entries":[1,{"stage":"image"}]}']
)
def test_what_cannot_be_read_is_nothing(text: str, environ: dict[str, str]) -> None:
    warm_record.write([Warmed(IMAGE, CACHED, "a")], environ)
    path = os.path.join(environ["BOOTSEER_CACHE"], warm_record.NAME)
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
    assert warm_record.find([(IMAGE, "a")], environ) == []
    warm_record.write([Warmed(IMAGE, CACHED, "a")], environ)
    assert len(warm_record.find([(IMAGE, "a")], environ)) == 1


def test_a_file_of_others_is_not_trusted(environ: dict[str, str]) -> None:
    warm_record.write([Warmed(IMAGE, CACHED, "a")], environ)
    os.chmod(os.path.join(environ["BOOTSEER_CACHE"], warm_record.NAME), 0o666)
    assert warm_record.find([(IMAGE, "a")], environ) == []
