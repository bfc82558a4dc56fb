"""Error files in every state a rank can leave them in."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.ranks import error_file as errorfile
from launcher.ranks.error_file import read_error_file, read_tail, write_own_error_file

TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: boom é\n'
RECORD = {
    "message": {"message": "ValueError: boom é", "extraInfo": {"py_callstack": TRACE, "timestamp": "1700000000"}}
}


def put(tmp_path, content):
    path = tmp_path / "error.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


def test_the_shape_that_record_writes(tmp_path):
    record = read_error_file(put(tmp_path, RECORD))
    assert record == ("ValueError: boom é", TRACE, 1700000000.0, "", RECORD)


def test_what_torch_itself_writes_is_read(tmp_path, monkeypatch):
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    try:
        raise ValueError("boom")
    except ValueError as error:
        errors.ErrorHandler().record_exception(error)
    record = read_error_file(str(tmp_path / "error.json"))
    assert record.message == "ValueError: boom"
    assert "test_what_torch_itself_writes_is_read" in record.traceback
    assert record.timestamp_s > 1.7e9


def test_the_plain_shape(tmp_path):
    record = read_error_file(put(tmp_path, {"message": "text", "timestamp": 12}))
    assert record[:4] == ("text", "", 12.0, "")


def test_no_file(tmp_path):
    assert read_error_file("") is None
    assert read_error_file(str(tmp_path / "none")) is None


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "empty"),
        (b"\x00\xff\xfe binary", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1, 2]", "no error message"),
        (b"null", "no error message"),
        (b'{"msg": 1}', "no error message"),
        (b'{"message": 5}', "no error message"),
        (b'{"message": null}', "no error message"),
    ],
)
def test_unusable_files_give_a_note(tmp_path, content, note):
    record = read_error_file(put(tmp_path, content))
    assert note in record.note
    assert record.message == f"({record.note})"
    assert record.data is None


@pytest.mark.parametrize(
    "message",
    [{}, {"message": 3}, {"message": None, "extraInfo": 5}, {"extraInfo": {"py_callstack": [1], "timestamp": []}}],
)
def test_wrong_types_inside_are_read_as_far_as_they_go(tmp_path, message):
    record = read_error_file(put(tmp_path, {"message": message}))
    assert isinstance(record.message, str)
    assert isinstance(record.traceback, str)
    assert record.timestamp_s is None
    assert record.note == ""


@pytest.mark.parametrize("stamp", ["nan", "inf", -1, 1e300, 10**400, "soon", {}, True])
def test_odd_timestamps(tmp_path, stamp):
    record = read_error_file(put(tmp_path, {"message": "m", "timestamp": stamp}))
    assert record.timestamp_s in (None, 1.0)


def test_a_truncated_file_still_gives_what_is_in_it(tmp_path):
    whole = json.dumps(RECORD).encode()
    record = read_error_file(put(tmp_path, whole[:-40]))
    assert record.message == "ValueError: boom é"
    assert record.traceback.startswith("Traceback")
    assert "not valid JSON" in record.note


@settings(deadline=None)
@given(st.integers(0, len(json.dumps(RECORD))))
def test_any_truncation_is_survived(tmp_path_factory, length):
    record = read_error_file(put(tmp_path_factory.mktemp("error"), json.dumps(RECORD).encode()[:length]))
    assert record.message
    if not record.message.startswith("("):
        assert RECORD["message"]["message"].startswith(record.message)
    assert TRACE.startswith(record.traceback)


@settings(deadline=None)
@given(
    st.binary(max_size=200) | st.recursive(st.none() | st.text() | st.floats(), st.lists).map(repr).map(str.encode)
)
def test_any_content_is_survived(tmp_path_factory, content):
    assert read_error_file(put(tmp_path_factory.mktemp("error"), content)).message


def test_a_huge_file_is_read_only_to_a_bound(tmp_path):
    huge = {"message": {"message": "E: " + "x" * 3_000_000, "extraInfo": {"py_callstack": "t"}}}
    record = read_error_file(put(tmp_path, huge))
    assert record.message.startswith("E: xxx")
    assert len(record.message) < errorfile.MAX_MESSAGE_CHARACTERS + 100
    assert "only the first" in record.note


def test_a_long_traceback_loses_its_middle(tmp_path):
    trace = "first\n" + "x\n" * 200_000 + "last"
    record = read_error_file(put(tmp_path, {"message": {"message": "m", "extraInfo": {"py_callstack": trace}}}))
    assert record.traceback.startswith("first")
    assert record.traceback.endswith("last")
    assert "characters left out" in record.traceback
    assert len(record.traceback) < errorfile.MAX_TRACEBACK_CHARACTERS + 100


def test_pipes_directories_and_links_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.mkdir(tmp_path / "dir")
    os.symlink(tmp_path / "fifo", tmp_path / "link")
    os.symlink(tmp_path / "loop", tmp_path / "loop")
    for name in ("fifo", "dir", "link"):
        assert "not a regular file" in read_error_file(str(tmp_path / name)).note
    assert "cannot be read" in read_error_file(str(tmp_path / "loop")).note


def test_the_own_file_is_a_copy_with_the_exit_status(tmp_path):
    own = tmp_path / "own.json"
    own.write_text("x" * 10_000)
    record = read_error_file(put(tmp_path, RECORD))
    assert write_own_error_file(str(own), record, -11) == ""
    written = json.loads(own.read_text())
    assert written["message"].pop("errorCode") == -11
    assert written == RECORD


def test_the_own_file_of_the_plain_shape_is_a_plain_copy(tmp_path):
    data = {"message": "text", "timestamp": 12}
    record = read_error_file(put(tmp_path, data))
    assert write_own_error_file(str(tmp_path / "own"), record, 1) == ""
    assert json.loads((tmp_path / "own").read_text()) == data


def test_the_own_file_without_a_rank_s_file(tmp_path):
    own = tmp_path / "own"
    assert write_own_error_file(str(own), None, 1) == ""
    assert not own.exists()
    assert write_own_error_file(str(own), None, -9, "rank 1 was killed", 5.7) == ""
    record = read_error_file(str(own))
    assert (record.message, record.timestamp_s) == ("rank 1 was killed", 5.0)
    assert record.data["message"]["errorCode"] == -9


def test_the_own_file_that_cannot_be_written_is_named(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "none" / "own", tmp_path, tmp_path / "fifo"):
        assert str(path) in write_own_error_file(str(path), None, 1, "text")


def test_read_tail(tmp_path):
    path = tmp_path / "stderr.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(10_000)) + b"end \xff" + b"y" * 5000)
    tail = read_tail(str(path), 3, 16_384)
    assert tail[:2] == ("line 9998", "line 9999")
    assert tail[2].startswith("end �yyy")
    assert len(tail[2]) == 2000
    assert len(read_tail(str(path), 10_000, 16_384)) < 2000
    assert read_tail(str(tmp_path / "none"), 3, 100) == ()
    assert read_tail(str(tmp_path), 3, 100) == ()
