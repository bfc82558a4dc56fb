"""`bench ckpt`: which figures it makes of its samples; what it takes for a cold file, a right load, bytes sent."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
import torch

from bench import (
    ckpt,
    ckpt_dcp,
    ckpt_fio,
    ckpt_hdfs,
    ckpt_http,
    ckpt_keeper,
    ckpt_local,
    ckpt_pages,
    ckpt_run,
    ckpt_waste,
)
from bench.ckpt_loader import PAGE_BYTES, digest, touch
from bench.ckpt_server import Server, to_span
from bench.record import BenchError, Figures, make_document, write_document

ROUNDS = ckpt.MINIMUM_ROUNDS
GB = 10**9


def load_of(seconds, cpu_s=0.1):
    return ckpt_run.Load(seconds, cpu_s, GB, 0, round(seconds * 1e9), {})


def local_figures():
    taken = []
    for number in range(1, ROUNDS + 1):
        cold = {name: load_of(3.0 * number) for name in ckpt_local.LOADERS} | {"bootseer": load_of(1.0 * number)}
        warm = {name: load_of(0.2) for name in ckpt_local.LOADERS} | {"safetensors": load_of(0.1)}
        fill = ckpt_keeper.Fill(2.0, 1.0, 0.5 * number, 0.05, GB, load_of(0.3))
        fio = [{"psync": 1e9 / number, "libaio": 2e9 / number}, {"psync": 1e9 / number, "libaio": 0.5e9 / number}]
        taken.append(ckpt_local.Round(fio, cold, warm, fill))
    return ckpt_local.to_figures(taken)


def http_figures(sent=GB):
    cases = {
        case: [ckpt_http.Sample({"node": 1.0, "readers": 6.0}.get(case, 2.0), 1.0, GB, sent)] * ROUNDS
        for case in ckpt_http.CASES
    }
    cases["readers"] = [each._replace(sent_bytes=8 * GB) for each in cases["readers"]]
    return ckpt_http.to_figures(cases)


def waste_figures():
    first = [ckpt_waste.Waste(100, 100)] * 4
    again = [ckpt_waste.Waste(100, read) for read in (100, 97, 95, 90)]
    return ckpt_waste.to_figures(first, again)


def hdfs_figures():
    seconds = {"plain": 12.0, "torch_plain": 12.0, "write_plain": 12.0, "ranges": 5.0, "mount_ranges": 5.0}
    made = {
        name: ckpt_hdfs.Transfer(seconds.get(name, 4.0), 1.0, GB, "", (50, 25, 25))
        for name in (*ckpt_hdfs.WRITES, *ckpt_hdfs.READS)
    }
    figures = Figures()
    for suffix in ("", "_r2"):
        ckpt_hdfs.add_figures(figures, [made] * ROUNDS, suffix)
    return figures


def dcp_figures():
    taken = {
        (reader, ranks): [ckpt_dcp.Job(2.0 if reader == "torch" else 1.0, 1.0, GB, [])] * ROUNDS
        for reader in ckpt_dcp.READERS
        for ranks in ckpt_dcp.RANKS
    }
    return ckpt_dcp.to_figures(taken)


def test_there_is_a_figure_for_each_target():
    found = {
        name: made for part in (local_figures, http_figures, hdfs_figures, dcp_figures) for name, made in part()
    }
    wanted = {name: target for name, target in ckpt.TARGETS.items() if not name.startswith("ckpt.prefetch_waste")}
    assert set(wanted) <= set(found)
    assert all(found[name].n >= target.samples for name, target in wanted.items())


def test_what_is_faster_here_has_the_larger_ratio():
    figures = local_figures()
    assert {name: figures[f"ckpt.{name}"].value for name in ("vs_safetensors", "vs_dcp", "vs_runai")} == {
        "vs_safetensors": 3.0,
        "vs_dcp": 3.0,
        "vs_runai": 3.0,
    }
    assert figures["ckpt.warm_vs_safetensors"].value == 0.5
    assert figures["ckpt.arena_cpu_s_per_gb"].value == 0.05
    ratios = hdfs_figures()
    assert ratios["ckpt.hdfs_read_ratio"].value == ratios["ckpt.hdfs_mount_ratio_r2"].value == 3.0
    assert ratios["ckpt.hdfs_striped_vs_ranges"].value == 1.25
    assert ratios["ckpt.hdfs_striped_busiest_share"].value == 0.5
    assert dcp_figures()["ckpt.dcp_ratio"].value == 2.0


def test_the_disk_of_a_round_is_the_mean_of_the_best_before_and_after():
    figures = local_figures()
    # 2000 and 1000 MB/s in the first round, ours 1000 MB/s, the arena 2000.
    assert figures["ckpt.disk_mb_s"].samples[0] == 1500.0
    assert figures["ckpt.disk_share"].samples == pytest.approx([1 / 1.5] * ROUNDS)
    assert figures["ckpt.arena_disk_share"].samples == pytest.approx([2 / 1.5] * ROUNDS)
    assert figures["ckpt.fio_psync_mb_s"].n == 2 * ROUNDS


def test_what_the_server_sent_is_compared_with_the_file():
    figures = http_figures(sent=GB + GB // 100)
    assert figures["ckpt.node_reads"].value == pytest.approx(1.01)
    assert figures["ckpt.http_readers_reads"].value == 8
    assert figures["ckpt.vs_8_readers"].value == 6
    with pytest.raises(BenchError, match="less than the file"):
        http_figures(sent=GB - 1)


def test_waste_is_what_was_fetched_and_not_asked_for(tmp_path):
    assert waste_figures()["ckpt.prefetch_waste"].samples == (0, 0.03, 0.05, 0.1)
    assert waste_figures()["ckpt.prefetch_waste_first"].value == 0
    (tmp_path / "loads").mkdir()
    with pytest.raises(BenchError, match="0 records"):
        ckpt_waste.recorded_bytes(str(tmp_path))
    files = [
        {"path": "a", "size": 100, "ranges": [[0, 10], [20, 25]]},
        {"path": "b", "size": 9, "ranges": [[0, 9]]},
    ]
    (tmp_path / "loads" / "key.json").write_text(json.dumps({"format": "x", "files": files}))
    assert ckpt_waste.recorded_bytes(str(tmp_path)) == 24


def test_a_cold_file_is_out_of_the_page_cache_and_a_warm_one_in_it(tmp_path):
    if ckpt_pages.file_system(str(tmp_path)) in ckpt_pages.MEMORY_SYSTEMS:
        pytest.skip("the folder of tests is in memory")
    (tmp_path / "below").mkdir()
    for name in ("one", "below/two"):
        (tmp_path / name).write_bytes(os.urandom(3 << 20))
    ckpt_pages.make_cold([str(tmp_path)])
    assert [ckpt_pages.resident_share(path) for path in ckpt_pages.list_files([str(tmp_path)])] == [0.0, 0.0]
    ckpt_pages.make_warm([str(tmp_path)])
    assert [ckpt_pages.resident_share(path) for path in ckpt_pages.list_files([str(tmp_path)])] == [1.0, 1.0]


def test_a_file_that_stays_in_the_page_cache_is_no_cold_one(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: None)
    with pytest.raises(BenchError, match=r"100% of it stay in the page cache"):
        ckpt_pages.make_cold([str(tmp_path / "file")])


def test_memory_is_no_disk_and_the_files_have_to_fit(tmp_path):
    with pytest.raises(BenchError, match="is no disk: name another with --folder"):
        ckpt_pages.check_disk("/dev/shm", 1)
    ckpt_pages.check_disk("/", 1)
    with pytest.raises(BenchError, match="GB free"):
        ckpt_pages.check_disk("/", 1 << 60)


def test_fio_reads_the_whole_file_once():
    size = 1_419_303_000
    for engine in ckpt_fio.ENGINES:
        words = dict(word[2:].partition("=")[::2] for word in ckpt_fio.command("/file", size, engine)[1:])
        jobs, part, request = int(words["numjobs"]), int(words["size"]), int(words["bs"])
        assert jobs * part <= size < jobs * (part + request)
        assert part % request == 0 and int(words["offset_increment"]) in (0, part)
        assert words["direct"] == "1"
    with pytest.raises(BenchError, match="too little for fio"):
        ckpt_fio.command("/file", 1000, "psync")


def test_without_fio_the_way_out_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BenchError, match="apt-get install fio"):
        ckpt_fio.check_fio()


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(ckpt.PEERS, "dcp", ("torch", "no_such_peer"))
    with pytest.raises(BenchError, match="not installed here: no_such_peer: pip install"):
        ckpt.check_installed(["dcp"], "full")
    ckpt.check_installed([], "full")


def tensors():
    return {"a": torch.arange(3000, dtype=torch.float32), "b": torch.tensor(7), "c": torch.zeros(0, 4)}


def test_a_digest_is_of_name_type_shape_and_bytes():
    right = digest(tensors())
    others = [
        {**tensors(), "b": torch.tensor(8)},
        {**tensors(), "b": torch.tensor([7])},
        {**tensors(), "b": torch.tensor(7, dtype=torch.int32)},
        {**tensors(), "a": tensors()["a"].to(torch.bfloat16)},
    ]
    assert digest(tensors()) == right
    assert all(digest(other) != right for other in others)
    assert set(right) == {"a", "b", "c"} and len(set(right.values())) == 3


def test_every_page_is_touched_once():
    pages = torch.zeros(5 * PAGE_BYTES, dtype=torch.uint8)
    pages[::PAGE_BYTES] = 1
    pages[-1] = 10
    assert touch({"pages": pages}) == 15


def test_loaders_that_differ_are_named_with_a_tensor():
    sums = ckpt_run.Sums()
    sums.check("first", {"a": "1", "b": "2"})
    sums.check("second", {"b": "2", "a": "1"})
    for wrong in ({"a": "1"}, {"a": "1", "b": "3"}, {"a": "1", "b": "2", "c": "4"}):
        with pytest.raises(BenchError, match=r"third and first have not the same tensors; 1 differ, as [bc]"):
            sums.check("third", wrong)


def test_each_round_another_one_begins():
    orders = [ckpt_run.order("abc", number) for number in range(9)]
    assert all(sorted(each) == ["a", "b", "c"] for each in orders)
    assert {each[0] for each in orders} == {"a", "b", "c"}
    assert orders == [ckpt_run.order("abc", number) for number in range(9)], "the same in each run"


def python(script):
    return [sys.executable, "-c", script], dict(os.environ)


def test_a_program_is_received_and_what_it_says_besides_is_passed_over():
    with ckpt_run.programs([python("print('x'); print('ready'); print(input())")]) as (program,):
        assert program.listen(lambda line: line == "ready\n") == "ready\n"
        program.say("go")
        assert program.listen(lambda line: line.startswith("g")) == "go\n"
        program.wait()


def test_a_program_that_fails_or_is_silent_is_an_error_with_its_last_words():
    with (
        ckpt_run.programs([python("import sys; sys.exit('no such thing')")]) as (program,),
        pytest.raises(BenchError, match=r"has ended without an answer \(status 1\)\nno such thing"),
    ):
        program.listen(lambda line: True)
    with (
        ckpt_run.programs([python("import time; time.sleep(60)")]) as (program,),
        pytest.raises(BenchError, match=r"said nothing for 0.1 s"),
    ):
        program.listen(lambda line: True, 0.1)


def test_no_program_is_left_when_one_fails():
    with (
        pytest.raises(ZeroDivisionError),
        ckpt_run.programs([python("print(1, flush=True); input()"), python("input()")]) as started,
    ):
        started[0].listen(lambda line: True)
        raise ZeroDivisionError
    assert all(program.has_ended() for program in started)


def test_cpu_time_and_memory_of_a_process_are_seen_from_outside():
    script = (
        "import os, time\n"
        "fd = os.memfd_create('arena'); os.ftruncate(fd, 8 << 20); os.posix_fallocate(fd, 0, 4 << 20)\n"
        "while time.process_time() < 0.3: pass\n"
        "print('ready', flush=True); input()\n"
    )
    with ckpt_run.programs([python(script)]) as (program,):
        program.listen(lambda line: line == "ready\n")
        assert 0.3 <= ckpt_keeper.cpu_of(program.pid) < 30
        assert ckpt_keeper.held_bytes(program.pid) == 4 << 20
    assert ckpt_keeper.cpu_of(program.pid) == 0


@pytest.mark.parametrize(
    ("text", "span"),
    [
        (None, (0, 100)),
        ("bytes=0-9", (0, 10)),
        ("bytes=90-", (90, 100)),
        ("bytes=-5", (95, 100)),
        ("bytes=50-1000", (50, 100)),
        ("bytes=0-1,5-6", (0, 0)),
        ("bytes=-", (0, 0)),
        ("lines=0-9", (0, 0)),
    ],
)
def test_a_range_header_is_understood(text, span):
    assert to_span(text, 100) == span


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
        return answer.status, answer.headers, answer.read()


def test_our_server_counts_the_bytes_that_it_sends_by_port(tmp_path):
    (tmp_path / "data").mkdir()
    content = os.urandom(3 << 20)
    (tmp_path / "data" / "file").write_bytes(content)
    (tmp_path / "secret").write_bytes(b"secret")
    server = Server(str(tmp_path / "data"), str(tmp_path / "server"), ports=2)
    server.kind = "python"
    with server:
        status, headers, body = get(server.url("file"), Range="bytes=1000-2099999")
        assert (status, body) == (206, content[1000:2_100_000])
        assert headers["Content-Range"] == f"bytes 1000-2099999/{len(content)}" and headers["ETag"]
        assert server.served_bytes() == [2_099_000, 0]
        assert get(server.url("file", 1))[2] == content
        assert server.served_bytes() == [2_099_000, len(content)]
        for name in ("missing", "../secret", "%2e%2e/secret"):
            with pytest.raises(urllib.error.HTTPError, match="404") as raised:
                get(server.url(name))
            raised.value.close()
        assert server.served_bytes() == [2_099_000, len(content)]
    with pytest.raises(OSError):
        get(server.url("file"))


@pytest.mark.slow
def test_a_loader_runs_in_a_process_of_its_own(tmp_path):
    path = ckpt_run.make_model(str(tmp_path), "small", ["pt"])["pt"]
    plain, mapped = (ckpt_run.load(name, path) for name in ("torch_load", "torch_mmap"))
    assert plain.digests == mapped.digests
    assert plain.size_bytes == sum(t.numel() * t.element_size() for t in torch.load(path).values())
    assert plain.seconds > 0 and plain.ended_ns > plain.began_ns
    with pytest.raises(BenchError, match=r"torch_load [^$]*No such file"):
        ckpt_run.load("torch_load", str(tmp_path / "missing"))


def test_figures_of_other_parts_join_when_the_same_code_was_measured(tmp_path):
    figures = Figures()
    figures.add("ckpt.dcp_ratio", "ratio", [2.0])
    path = str(tmp_path / "dcp.json")
    write_document(path, make_document("ckpt", [], figures))
    joined = Figures()
    ckpt.add_file(joined, path)
    assert joined["ckpt.dcp_ratio"] == figures["ckpt.dcp_ratio"]
    document = json.loads((tmp_path / "dcp.json").read_text())
    write_document(path, {**document, "commit": "0" * 40})
    with pytest.raises(BenchError, match="measure it anew"):
        ckpt.add_file(Figures(), path)


def test_the_bench_is_listed():
    ended = subprocess.run(
        [sys.executable, "-m", "bench", "--help"], capture_output=True, text=True, cwd=ckpt_run.ROOT
    )
    assert "\n  ckpt " in ended.stdout
