"""`bench image`: which figures it makes of its samples, what its remote gives; the whole of it on a small tree."""

import concurrent.futures
import http.client
import json
import os
import random
import shutil
import tarfile
import urllib.error
from pathlib import Path

import pytest

from bench import image, image_blocks, image_hot, image_layers, image_tree, image_ways
from bench.__main__ import main
from bench.ckpt_server import fetch
from bench.image_layers import make_layers, pull, split
from bench.image_remote import LATENCY_S, RATE_BYTES_PER_S, SLICE_BYTES, Link, Pipe, Remote, Served, check_link
from bench.image_ways import REMOTE, WAYS, Sample
from bench.record import BenchError
from bootseer.blocks.trace import Trace
from tests.campaign import IS_FULL
from tests.integration.mounted_trees import need_mounts

ROUNDS = image.MINIMUM_ROUNDS
TREE = "ab" * 32


def sample(wall_s, blocked_s=0.0, requests=9):
    return Sample(wall_s, blocked_s, 1000 * requests, requests, "right", wall_s / 2)


def taken(**other):
    ways = {
        "local_cold": sample(4.0, requests=0),
        "local_warm": sample(2.0, requests=0),
        "layer_pull": sample(40.0, 36.0),
        "parallel_full": sample(20.0, 16.0),
        "lazy": sample(30.0, 25.0),
        "prefetch": sample(5.0, 0.5),
        "second": sample(4.5, requests=0),
        **other,
    }
    return {"import": {way: [each] * ROUNDS for way, each in ways.items()}}


LINKS = [Link(199e6, 0.0055)] * ROUNDS


def met(figures):
    return {name for name, made in figures if name in image.TARGETS and image.TARGETS[name].is_met(made.value)}


def test_figures_are_made_of_the_ways_that_they_are_named_after():
    figures = image.to_figures(taken(), LINKS)
    assert figures["image.blocked_share"].value == 0.5 / 25
    assert figures["image.vs_local_cold"].value == 5 / 4
    assert figures["image.vs_layer_pull"].value == 8
    assert figures["image.vs_parallel_full"].value == 4
    assert figures["image.second_requests"].value == 0
    assert figures["image.import_prefetch_ready_s"].value == 2.5
    assert met(figures) == set(image.TARGETS) - {"image.tree_bytes", "image.tree_files"}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"prefetch": sample(5.0, 1.3)}, {"image.blocked_share"}),
        ({"local_cold": sample(3.5)}, {"image.vs_local_cold"}),
        ({"layer_pull": sample(19.0)}, {"image.vs_layer_pull"}),
        ({"parallel_full": sample(8.9)}, {"image.vs_parallel_full"}),
        ({"second": sample(4.5, requests=1)}, {"image.second_requests"}),
    ],
)
def test_each_target_is_missed_by_what_it_is_about(change, missed):
    assert met(image.to_figures(taken(), LINKS)) - met(image.to_figures(taken(**change), LINKS)) == missed


@pytest.mark.parametrize("change", [{"lazy": sample(30.0, 0.0)}, {"prefetch": sample(5.0, 0.5, requests=0)}])
def test_a_start_that_fetched_nothing_makes_no_figure(change):
    with pytest.raises(BenchError, match="was the cache not empty"):
        image.to_figures(taken(**change), LINKS)


def test_ways_that_print_different_results_end_the_bench():
    program = image_tree.import_program("python", "", ["json"])
    image.check_same(program, [sample(1.0), sample(2.0)])
    with pytest.raises(BenchError, match="different results"):
        image.check_same(program, [sample(1.0), sample(2.0)._replace(checksum="wrong")])


# ---- recordings ----------------------------------------------------------------------------------------------


def trace(blocks):
    ones = [1] * len(blocks)
    return Trace(tree=TREE, workload="0" * 16, runs=1, blocks=blocks, seen=ones, first_ms=list(range(len(blocks))))


def test_recordings_agree_as_far_as_their_blocks_and_order_do():
    same = image_hot.compare(trace([5, 1, 3]), trace([5, 1, 3]))
    assert same.jaccard == 1
    assert same.spearman == pytest.approx(1)
    assert same.missed_share == 0
    turned = image_hot.compare(trace([1, 2, 3, 4]), trace([9, 4, 3, 2, 1]))
    assert turned.jaccard == 4 / 5
    assert turned.spearman == pytest.approx(-1)
    assert turned.missed_share == 1 / 5
    swapped = image_hot.compare(trace(list(range(100))), trace([1, 0, *range(2, 100)]))
    assert 0.999 < swapped.spearman < 1
    with pytest.raises(BenchError, match="no blocks in common"):
        image_hot.compare(trace([1, 2]), trace([3, 4]))


def test_the_share_of_hot_blocks_counts_blocks_and_bytes():
    figures = image_hot.to_figures("import", [trace([0, 1]), trace([1, 0]), trace([0, 1, 2])], 10, [4000] * 10)
    assert figures["image.import_hot_share"].samples == (0.2, 0.2, 0.3)
    assert figures["image.import_hot_byte_share"].value == pytest.approx(0.2)
    assert figures["image.import_hot_jaccard"].n == 3  # pairs


# ---- remote --------------------------------------------------------------------------------------------------


def test_the_pipe_lets_through_its_rate_however_many_ask():
    pipe, now_s, rng = Pipe(1e6), 100.0, random.Random(1)
    begin_s, sent = now_s, 0
    for _ in range(2000):
        count = rng.randint(1, 5000)
        now_s = max(now_s, pipe.reserve(count, now_s))  # waits for its turn
        sent += count
    assert sent / (now_s - begin_s) == pytest.approx(1e6, rel=0.01)
    together = [pipe.reserve(1000, now_s) for _ in range(50)]
    assert together == sorted(together)
    assert together[-1] - together[0] == pytest.approx(49 * 1000 / 1e6)
    idle = pipe.reserve(1000, now_s + 60)
    assert idle > now_s + 59.9  # what was not used is gone, but for a moment's worth


def test_a_remote_that_is_faster_than_it_says_is_refused():
    check_link(Link(0.9 * RATE_BYTES_PER_S, LATENCY_S))
    for link in (Link(1.2 * RATE_BYTES_PER_S, LATENCY_S), Link(RATE_BYTES_PER_S, LATENCY_S / 2)):
        with pytest.raises(BenchError, match="has to give"):
            check_link(link)


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "file").write_bytes(random.Random(2).randbytes(10 * SLICE_BYTES + 17))
    return directory


def test_the_remote_gives_files_and_ranges_and_counts_them(data, tmp_path):
    content = (data / "file").read_bytes()
    with Remote(os.fspath(data), os.fspath(tmp_path / "log")) as remote:
        assert remote.served() == Served(0, 0)
        assert fetch(remote.url("file")) == content
        assert remote.served() == Served(1, len(content))
        host, port = remote.url("").removeprefix("http://").rstrip("/").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        for headers, status, body in (
            ({"Range": "bytes=5-99999"}, 206, content[5:100000]),
            ({"Range": "bytes=-3"}, 206, content[-3:]),
            ({"Range": f"bytes={len(content)}-"}, 416, b""),
            ({"If-Match": '"other"'}, 412, b""),
        ):
            connection.request("GET", "/file", headers=headers)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (status, body)
        connection.close()
        for name in ("missing", "../log"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                fetch(remote.url(name))
        assert remote.served() == Served(7, len(content) + 99995 + 3)


def test_many_readers_share_one_link(data, tmp_path):
    (data / "large").write_bytes(bytes(4 << 20))
    with (
        Remote(os.fspath(data), os.fspath(tmp_path / "log")) as remote,
        concurrent.futures.ThreadPoolExecutor(16) as pool,
    ):
        link = remote.measure("large")
        assert link.latency_s >= LATENCY_S
        assert link.bytes_per_s <= 1.1 * RATE_BYTES_PER_S
        before = remote.served()
        sizes = list(pool.map(lambda _: len(fetch(remote.url("large"))), range(32)))
        assert sum(sizes) == 32 * (4 << 20) == remote.served().since(before).sent_bytes


# ---- layers --------------------------------------------------------------------------------------------------


def make_files(directory):
    rng = random.Random(3)
    for number in range(40):
        path = directory / f"d{number % 5}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(5000))
    (directory / "d0" / "link").symlink_to("f0")
    (directory / "empty").mkdir()


def snapshot(directory):
    found = {}
    for above, directories, names in os.walk(directory):
        for name in (*directories, *names):
            path = os.path.join(above, name)
            about = os.lstat(path)
            value = os.readlink(path) if os.path.islink(path) else None
            if os.path.isfile(path) and value is None:
                with open(path, "rb") as file:
                    value = (file.read(), int(about.st_mtime))
            found[os.path.relpath(path, directory)] = (about.st_mode, value)
    return found


@pytest.mark.parametrize("name", ["as found", "gzip"])
def test_pulled_layers_are_the_root_again(tmp_path, monkeypatch, name):
    if name != "as found":
        monkeypatch.setattr(image_layers, "unpacker", lambda: name)
    root = tmp_path / "root"
    make_files(root)
    parts = split(os.fspath(root))
    assert len(parts) == image_layers.LAYERS
    assert sorted(path for part in parts for path in part) == sorted(snapshot(root))
    layers = make_layers(os.fspath(root), os.fspath(tmp_path / "data" / "layers"))
    with tarfile.open(tmp_path / "data" / "layers" / layers[0].name) as tar:
        assert tar.getnames() == parts[0]
    with Remote(os.fspath(tmp_path / "data"), os.fspath(tmp_path / "log")) as remote:
        pull(remote.url("layers"), os.fspath(tmp_path / "out"), os.fspath(tmp_path / "blobs"))
        assert snapshot(tmp_path / "out") == snapshot(root)
        assert remote.served().requests == len(layers) + 1


def test_a_layer_that_was_changed_is_refused(tmp_path):
    root = tmp_path / "root"
    make_files(root)
    layer = make_layers(os.fspath(root), os.fspath(tmp_path / "data" / "layers"))[-1]
    path = tmp_path / "data" / "layers" / layer.name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with (
        Remote(os.fspath(tmp_path / "data"), os.fspath(tmp_path / "log")) as remote,
        pytest.raises(BenchError, match="not what its digest says"),
    ):
        pull(remote.url("layers"), os.fspath(tmp_path / "out"), os.fspath(tmp_path / "blobs"))


# ---- the whole ------------------------------------------------------------------------------------------------


def test_a_directory_that_is_none_is_reported(tmp_path):
    with pytest.raises(BenchError, match="is no folder"):
        image_tree.make_root(os.fspath(tmp_path / "missing"), os.fspath(tmp_path / "made"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Options for a tree of two packages; what is made of it is kept for the next test."""
    need_mounts()
    modules = tmp_path_factory.mktemp("modules")
    for name in ("email", "json"):
        source = os.path.join(os.path.dirname(os.__file__), name)
        shutil.copytree(source, modules / f"own_{name}", ignore=shutil.ignore_patterns("__pycache__"))
    directory = tmp_path_factory.mktemp("kept")
    directory.chmod(0o700)
    return ["image", "--tree", os.fspath(modules), "--folder", os.fspath(directory)]


@pytest.fixture
def kept(small, monkeypatch):
    """The folder, in which nothing is mounted afterwards."""
    monkeypatch.setattr(image_ways, "TOUCHED_BYTES", 1 << 20)  # nothing is measured here
    yield Path(small[-1])
    with open("/proc/self/mounts") as file:
        assert small[-1] not in file.read()


@pytest.mark.system
def test_the_whole_bench_runs_with_a_small_tree(small, kept, tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert main([*small, "--rounds", "1", "--json", os.fspath(path)]) == 0, capsys.readouterr().err
    figures = json.loads(path.read_text())["figures"]
    assert set(image.TARGETS) <= set(figures)
    assert {f"image.import_{way}_s" for way in WAYS} <= set(figures)
    assert {f"image.import_{way}_{what}" for way in REMOTE for what in ("blocked_s", "mb")} <= set(figures)
    values = {name: made["value"] for name, made in figures.items()}
    assert values["image.second_requests"] == values["image.import_second_mb"] == 0
    assert values["image.import_prefetch_mb"] < values["image.import_parallel_full_mb"]
    assert values["image.import_prefetch_late_reads"] < values["image.import_lazy_late_reads"]
    assert values["image.import_second_late_reads"] == 0 < values["image.import_second_reads"]
    assert values["image.import_prefetch_blocked_s"] < values["image.import_lazy_blocked_s"]
    assert os.listdir(kept) == ["own"]  # what was made for the rounds is gone


@pytest.mark.system
def test_recordings_of_a_small_tree_are_compared(small, kept, capsys):
    built = kept / "own" / "built.json"
    made = os.path.getmtime(built) if built.exists() else None
    assert main([*small, "--hot", "--hot-runs", "2"]) == 0, capsys.readouterr().err
    assert "image.import_hot_jaccard" in capsys.readouterr().out
    assert made in (None, os.path.getmtime(built))  # what was made is used again


@pytest.mark.system
def test_blocks_of_several_sizes_of_a_small_tree(small, kept, tmp_path, monkeypatch):
    if not IS_FULL:
        monkeypatch.setattr(image_blocks, "SIZES_KIB", (64, 128))  # figures are compared with 128
    path = tmp_path / "figures.json"
    assert main([*small, "--blocks", "--rounds", "1", "--json", os.fspath(path)]) == 0
    figures = {name: made["value"] for name, made in json.loads(path.read_text())["figures"].items()}
    requests = [figures[f"image.blocks_{size}_kib_lazy_requests"] for size in image_blocks.SIZES_KIB]
    assert requests == sorted(requests, reverse=True)
    assert figures["image.blocks_64_kib_second_requests"] == 0 < figures["image.blocks_64_kib_prefetch_s"]
