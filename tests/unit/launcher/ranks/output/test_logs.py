"""Masks, the log plan and the log tree. The plan is compared with torchrun's own class."""

import os
import stat

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import ConfigError, LaunchError
from launcher.ranks.output import logs
from launcher.ranks.output.logs import Masks, RankLogs, parse_local_ranks, parse_masks, plan_logs

NONE = Masks(0, {})


@pytest.mark.parametrize("text", ["0", "1", "2", "3"])
def test_one_mask_is_for_every_rank(text):
    masks = parse_masks(text)
    assert [masks.of(rank) for rank in (0, 7, 123)] == [int(text)] * 3


def test_mapping_leaves_other_ranks_alone():
    masks = parse_masks("0:3,10:1,255:2")
    assert [masks.of(rank) for rank in (0, 1, 10, 255)] == [3, 0, 1, 2]


@pytest.mark.parametrize(
    "text", ["", "4", "-1", "x", "0:", ":1", "0:4", "0:1,", ",0:1", "0:1;1:2", "0=1", "1:33", "3:x"]
)
def test_wrong_masks_are_named_in_one_line(text):
    with pytest.raises(ConfigError) as caught:
        parse_masks(text, "--tee")
    assert repr(text) in str(caught.value)
    assert "--tee" in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(deadline=None)
@given(st.text(alphabet="0123:,45 \n", max_size=12))
def test_all_that_torchrun_accepts_means_the_same(text):
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")
    try:
        theirs = api.to_map(api.Std.from_str(text), 12)
    except ValueError:
        return
    ours = parse_masks(text)
    assert {rank: int(mask) for rank, mask in theirs.items()} == {rank: ours.of(rank) for rank in range(12)}


def test_local_ranks():
    assert parse_local_ranks("0,1,12") == {0, 1, 12}
    assert parse_local_ranks("") == frozenset()
    with pytest.raises(ConfigError, match="'0,x'"):
        parse_local_ranks("0,x")


masks = st.one_of(
    st.integers(0, 3).map(lambda mask: Masks(mask, {})),
    st.dictionaries(st.integers(0, 4), st.integers(0, 3)).map(lambda by_rank: Masks(0, by_rank)),
)


@settings(deadline=None)
@given(masks, masks, st.sets(st.integers(0, 4)))
def test_plan_is_that_of_torchrun(tmp_path_factory, redirects, tee, shown):
    api = pytest.importorskip("torch.distributed.elastic.multiprocessing.api")

    def theirs_of(mask):
        if mask.by_rank:
            return {rank: api.Std(value) for rank, value in mask.by_rank.items()}
        return api.Std(mask.every)

    nproc = 3
    base = str(tmp_path_factory.mktemp("logs"))
    specs = api.DefaultLogsSpecs(base, theirs_of(redirects), theirs_of(tee), shown)
    envs = {rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"} for rank in range(nproc)}
    theirs = specs.reify(envs)
    run_dir = os.path.dirname(os.path.dirname(os.path.dirname(theirs.error_files[0])))
    ours = plan_logs(run_dir, 2, nproc, redirects, tee, shown)
    for rank, plan in enumerate(ours):
        assert (plan.stdout_path or "") == theirs.stdouts[rank]
        assert (plan.stderr_path or "") == theirs.stderrs[rank]
        assert plan.tee_stdout == (rank in theirs.tee_stdouts)
        assert plan.tee_stderr == (rank in theirs.tee_stderrs)
        assert plan.error_file == theirs.error_files[rank] == envs[rank]["TORCHELASTIC_ERROR_FILE"]
    assert logs.filtered_path(run_dir, 2, 1) == theirs.filtered_stdout
    assert logs.filtered_path(run_dir, 2, 2) == theirs.filtered_stderr


def test_without_a_log_dir_all_goes_to_the_console():
    plan = plan_logs("/dev/null", 0, 2, Masks(3, {}), Masks(3, {}), {1})
    assert plan == (RankLogs(None, None, False, False, ""),) * 2
    assert logs.filtered_path("/dev/null", 0, 1) == ""


def test_default_run_dir_is_fresh_and_temporary(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    one, other = logs.make_run_dir(None, "job"), logs.make_run_dir("", "job")
    assert one != other
    for path in (one, other):
        assert os.path.isdir(path)
        parent, name = os.path.split(path)
        assert os.path.dirname(parent) == str(tmp_path)
        assert os.path.basename(parent).startswith("torchelastic_")
        assert name.startswith("job_")
        assert stat.S_IMODE(os.stat(parent).st_mode) == 0o700


def test_given_log_dir_is_made_and_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = logs.make_run_dir("a/b", "job")
    assert os.path.dirname(path) == str(tmp_path / "a" / "b")


def test_dev_null_makes_nothing():
    assert logs.make_run_dir("/dev/null", "job") == "/dev/null"
    logs.make_attempt_dirs("/dev/null", 0, 2)


@settings(deadline=None)
@given(st.text(max_size=300))
def test_no_run_id_leads_out_of_the_log_dir(tmp_path_factory, run_id):
    base = tmp_path_factory.mktemp("logs")
    path = logs.make_run_dir(str(base), run_id)
    assert os.path.dirname(os.path.realpath(path)) == os.path.realpath(base)
    assert [entry.path for entry in os.scandir(base)] == [path]


def test_a_file_as_log_dir_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match=f"log dir {path} is a file"):
        logs.make_run_dir(str(path), "job")


def test_a_log_dir_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=str(tmp_path / "file")):
        logs.make_run_dir(str(tmp_path / "file" / "below"), "job")
    with pytest.raises(ConfigError, match="/proc"):
        logs.make_run_dir("/proc/nothing", "job")


def test_attempts_never_take_the_place_of_earlier_ones(tmp_path):
    run_dir = logs.make_run_dir(str(tmp_path), "job")
    logs.make_attempt_dirs(run_dir, 0, 11)
    assert sorted(os.listdir(f"{run_dir}/attempt_0"), key=int) == [str(rank) for rank in range(11)]
    kept = f"{run_dir}/attempt_0/3/stdout.log"
    with open(kept, "w") as file:
        file.write("kept")
    with pytest.raises(LaunchError, match="attempt_0"):
        logs.make_attempt_dirs(run_dir, 0, 11)
    logs.make_attempt_dirs(run_dir, 1, 11)
    with open(kept) as file:
        assert file.read() == "kept"


def test_line_prefixes():
    assert logs.line_prefix(None, "default", 9, 1) == b"[default1]:"
    assert logs.line_prefix("${role_name}/$rank/${local_rank} $other$$ ", "r", 9, 1) == b"r/9/1 $other$ "
