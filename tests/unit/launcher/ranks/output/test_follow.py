"""Lines taken from a growing file: intact, in order, whatever the chunks in which it grows."""

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.ranks.output import follow
from launcher.ranks.output.follow import LogCursor, LogFile, add_prefix


def take_all(cursor):
    taken = b""
    while body := cursor.take():
        taken += body
    return taken


def follow_chunks(path, chunks, take_after):
    """All that a cursor takes of a file written in chunks, taking after some of them."""
    source = LogFile(str(path))
    source.open()
    cursor = LogCursor(source)
    taken = []
    try:
        with open(path, "ab", buffering=0) as file:
            for chunk, take in zip(chunks, take_after, strict=True):
                file.write(chunk)
                if take:
                    taken.append(take_all(cursor))
        taken.append(take_all(cursor))
        source.ended = True
        taken.append(take_all(cursor))
        assert cursor.take() == b""
        assert cursor.count_left() == 0
    finally:
        source.close()
    return taken


chunk_lists = st.lists(
    st.tuples(st.binary(max_size=20) | st.sampled_from([b"\n", b"a\nb", b"x" * 50]), st.booleans())
)


@settings(deadline=None)
@given(chunk_lists)
def test_lines_are_intact_and_in_order(tmp_path_factory, written):
    written = [(chunk.replace(b"\r", b"R"), take) for chunk, take in written]
    path = tmp_path_factory.mktemp("follow") / "log"
    chunks = [chunk for chunk, _ in written]
    taken = follow_chunks(path, chunks, [take for _, take in written])
    whole = b"".join(chunks)
    assert all(not batch or batch.endswith(b"\n") for batch in taken)
    assert b"".join(taken) == whole + (b"" if not whole or whole.endswith(b"\n") else b"\n")


@settings(deadline=None)
@given(chunk_lists)
def test_carriage_returns_end_lines_however_the_file_grows(tmp_path_factory, written):
    path = tmp_path_factory.mktemp("follow") / "log"
    chunks = [chunk.replace(b"a", b"\r").replace(b"x", b"\r\n") for chunk, _ in written]
    taken = follow_chunks(path, chunks, [take for _, take in written])
    dressed = b"".join(add_prefix(batch, b">") for batch in taken)
    whole = b"".join(chunks)
    texts = [line.removeprefix(b">") for line in dressed.splitlines()]
    assert [text for text in texts if text] == [text for text in whole.splitlines() if text]
    assert b"\r" not in dressed
    assert all(line.startswith(b">") for line in dressed.splitlines())


def test_progress_bars_become_lines(tmp_path):
    taken = follow_chunks(tmp_path / "log", [b"\r 10%", b"\r 20%", b"\r100%\n", b"done\r\n"], [True] * 4)
    assert b"".join(add_prefix(batch, b"") for batch in taken) == b" 10%\n 20%\n100%\ndone\n"


def test_long_lines_are_whole_up_to_the_limit_and_cut_beyond(tmp_path):
    fits = b"a" * (follow.MAX_LINE_BYTES - 1) + b"\n"
    taken = follow_chunks(tmp_path / "one", [fits[:70_000], fits[70_000:]], [True, True])
    assert [batch for batch in taken if batch] == [fits]
    longer = b"b" * (follow.MAX_LINE_BYTES + 100)
    taken = follow_chunks(tmp_path / "two", [longer, b"\nshort\n"], [True, True])
    assert b"".join(taken) == longer[: follow.MAX_LINE_BYTES] + b"\n" + b"b" * 100 + b"\nshort\n"


def test_a_cut_file_is_read_from_its_new_start(tmp_path):
    path = tmp_path / "log"
    source = LogFile(str(path))
    source.open()
    cursor = LogCursor(source)
    path.write_bytes(b"one\ntwo\nthr")
    assert take_all(cursor) == b"one\ntwo\n"
    os.truncate(path, 0)
    assert take_all(cursor) == b""
    path.write_bytes(b"new\n")
    assert take_all(cursor) == b"new\n"
    os.truncate(path, 0)
    path.write_bytes(b"x\n")
    assert take_all(cursor) == b"x\n"
    source.close()


def test_needles_select_lines_and_prefix_stands_on_each():
    body = b"keep 1\ndrop\nalso keep\n"
    assert add_prefix(body, b"[r0]:", (b"keep",)) == b"[r0]:keep 1\n[r0]:also keep\n"
    assert add_prefix(body, b"[r0]:", (b"none",)) == b""


@settings(deadline=None)
@given(st.lists(st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"")), min_size=1))
def test_undress_counts_what_the_log_file_holds(lines):
    body = b"".join(line + b"\n" for line in lines)
    assert follow.count_without_prefix(add_prefix(body, b"[pre]:"), b"[pre]:") == len(body)
