"""New lines of log files, and no more than a look may cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.ranks.output.logs import RankLogs
from launcher.rules.node_rules import RankReader, describe_beat


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[RankReader]:
    made = RankReader(3, RankLogs(f"{tmp_path}/out", f"{tmp_path}/err", False, False, ""))
    yield made
    made.close()


def write(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_whole_lines_as_they_come(tmp_path: Path, reader: RankReader) -> None:
    assert reader.read(1000) == ([], 0, []), "before the rank has opened them"
    write(tmp_path / "out", b"one\ntwo\r\n\nhal")
    write(tmp_path / "err", b"10%\r20%\r30%\nbytes \xff\n")
    assert reader.read(1000) == (["one", "two", "10%", "20%", "30%", "bytes \ufffd"], 0, [])
    write(tmp_path / "out", b"f\nrest")
    assert reader.read(1000) == (["half"], 0, [])
    reader.end()
    assert reader.read(1000) == (["rest"], 0, []), "nobody writes the rest of it any more"
    assert reader.read(1000) == ([], 0, [])


def test_of_a_flood_the_newest_whole_lines(tmp_path: Path, reader: RankReader) -> None:
    lines = [f"line {number}" for number in range(10_000)]
    data = "".join(line + "\n" for line in lines).encode()
    write(tmp_path / "out", data)
    batch = reader.read(1000)
    assert batch.skipped_bytes == len(data) - 1000
    assert batch.lines == lines[-len(batch.lines) :]
    assert 80 < len(batch.lines) < 100
    write(tmp_path / "out", b"next\n")
    assert reader.read(1000) == (["next"], 0, [])


def test_what_goes_to_no_file_is_not_read() -> None:
    assert RankReader(0, RankLogs(None, os.devnull, False, False, "")).files == 0


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    reader = RankReader(0, RankLogs(f"{tmp_path}/none/out", None, False, False, ""))
    with pytest.raises(FileNotFoundError):
        reader.read(1000)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            b'{"name":"heartbeat","value":7,"attrs":{"loss":0.5,"note":"a b","odd":null}}',
            "heartbeat step=7 loss=0.5 note=a b",
        ),
        (b'{"name":"heartbeat","value":7}', "heartbeat step=7"),
        (b'{"name":"torch","value":7}', ""),
        (b'{"name":"heartbeat","value":', ""),
        (b'["name":"heartbeat"]', ""),
        (b'{"name":"heartbeat","attrs":[1]}', ""),
    ],
)
def test_heartbeats_are_lines(event: bytes, line: str) -> None:
    assert describe_beat(event) == line


def test_heartbeats_are_read_apart(tmp_path: Path) -> None:
    reader = RankReader(3, RankLogs(f"{tmp_path}/out", None, False, False, ""), f"{tmp_path}/events")
    assert reader.read(1000) == ([], 0, []) and not (tmp_path / "events").exists()
    event = b'{"name":"heartbeat","value":7}\n'
    write(tmp_path / "events", event + b"torn" + event[:9])
    assert reader.read(1000) == ([], 0, ["heartbeat step=7"])
    write(tmp_path / "events", event[9:] + 100 * event)
    assert 20 <= len(reader.read(1000).heartbeats) <= 40, "of a flood the newest"
    reader.close()
