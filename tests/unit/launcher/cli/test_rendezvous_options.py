"""Backend, endpoint, --rdzv-conf and --standalone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError
from launcher.cli.parser import parse
from launcher.cli.rendezvous_options import (
    RendezvousPlace,
    find_meeting,
    parse_conf,
    parse_endpoint,
    parse_min_max_nnodes,
    read_is_host,
    read_port_range,
    read_timing,
)


def meeting_of(*argv: str) -> tuple[RendezvousPlace, list[str]]:
    warnings: list[str] = []
    args = parse([*argv, "script.py"], {})
    return find_meeting(args, parse_conf(args.rdzv_conf), warnings), warnings


C10D = ("--rdzv-backend", "c10d")


@pytest.mark.parametrize(("text", "nodes"), [("3", (3, 3)), ("1:4", (1, 4)), (" 2 : 2 ", (2, 2))])
def test_nnodes(text: str, nodes: tuple[int, int]) -> None:
    assert parse_min_max_nnodes(text) == nodes


@pytest.mark.parametrize("text", ["", "0", "-1", "2:1", "1:2:3", "a:b", "1:", "1.5"])
def test_impossible_nnodes(text: str) -> None:
    with pytest.raises(ConfigError, match="--nnodes"):
        parse_min_max_nnodes(text)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("head", ("head", 29400)),
        ("head:1", ("head", 1)),
        (" 10.0.0.1:65535 ", ("10.0.0.1", 65535)),
        ("[::1]:8", ("::1", 8)),
        ("[fe80::1%eth0]", ("fe80::1%eth0", 29400)),
        ("fd00::2", ("fd00::2", 29400)),
        ("_gpu-3.cluster.local", ("_gpu-3.cluster.local", 29400)),
    ],
)
def test_endpoints(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text, 29400) == endpoint


@pytest.mark.parametrize("text", ["", ":1", "head:", "head:x", "head:65536", "he ad:1", "tcp://head:1", "head:-1"])
def test_wrong_endpoints(text: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        parse_endpoint(text, 29400)


@given(st.text(max_size=30))
def test_any_text_is_an_endpoint_or_refused(text: str) -> None:
    try:
        host, port = parse_endpoint(text, 29400)
    except ConfigError:
        return
    assert host and 0 <= port <= 65535


def test_one_node_with_nothing_given_is_as_standalone() -> None:
    for argv in ((), ("--standalone",)):
        meeting, warnings = meeting_of(*argv)
        assert meeting == RendezvousPlace("c10d", 1, 1, ("localhost", 0), "", True, None, None)
        assert warnings == []


def test_standalone_says_what_it_overrides() -> None:
    argv = ("--standalone", *C10D, "--rdzv-endpoint=h:1", "--rdzv-id=x", "--master-port=5", "--nnodes=2")
    meeting, warnings = meeting_of(*argv)
    assert meeting.is_single and meeting.max_nodes == 1 and meeting.run_id == ""
    assert warnings[0].endswith("--rdzv-backend, --rdzv-endpoint, --rdzv-id, --master-port")
    assert "--nnodes" in warnings[1]


def test_static() -> None:
    meeting, _ = meeting_of("--nnodes=2", "--node-rank=1", "--master-addr=head", "--rdzv-id=j")
    assert meeting == RendezvousPlace("static", 2, 2, ("head", 29500), "j", False, ("head", 29500), 1)
    assert meeting_of("--nnodes=2", "--master-addr=fd00::1", "--master-port=7")[0].master == ("fd00::1", 7)
    assert meeting_of("--nnodes=2", "--rdzv-endpoint=a:8", "--master-addr=b")[0].master == ("a", 8)


def test_static_on_one_node_with_a_port() -> None:
    meeting, _ = meeting_of("--master-port=1234")
    assert meeting == RendezvousPlace("static", 1, 1, ("127.0.0.1", 1234), "none", True, ("127.0.0.1", 1234), 0)


def test_static_waits_for_all_nodes() -> None:
    meeting, warnings = meeting_of("--nnodes=1:3", "--master-addr=head")
    assert (meeting.min_nodes, meeting.max_nodes) == (3, 3)
    assert "all 3 nodes" in warnings[0]


@pytest.mark.parametrize("rank", ["-1", "2"])
def test_node_ranks_of_static_must_fit(rank: str) -> None:
    with pytest.raises(ConfigError, match=f"--node-rank {rank}"):
        meeting_of("--nnodes=2", f"--node-rank={rank}", "--master-addr=head")


def test_c10d() -> None:
    meeting, warnings = meeting_of(*C10D, "--nnodes=1:4", "--rdzv-endpoint=head", "--node-rank=3")
    assert meeting == RendezvousPlace("c10d", 1, 4, ("head", 29400), "none", False, None, 3)
    assert warnings == []
    assert meeting_of(*C10D, "--nnodes=2", "--rdzv-endpoint=head")[0].node_rank is None
    assert meeting_of(*C10D, "--nnodes=2", "--rdzv-endpoint=head", "--node-rank=0")[0].node_rank == 0


def test_c10d_on_one_node() -> None:
    assert meeting_of(*C10D)[0].is_single
    assert meeting_of(*C10D, "--rdzv-endpoint=localhost:0")[0].is_single
    assert not meeting_of(*C10D, "--rdzv-endpoint=localhost:29400")[0].is_single  # a spare may come


def test_c10d_without_an_endpoint_meets_on_this_host() -> None:
    meeting, warnings = meeting_of(*C10D, "--nnodes=2")
    assert meeting.endpoint == ("localhost", 29400) and not meeting.is_single
    assert "--rdzv-endpoint is not given" in warnings[0]


def test_c10d_with_port_0_is_alone() -> None:
    meeting, warnings = meeting_of(*C10D, "--nnodes=1:4", "--rdzv-endpoint=localhost:0")
    assert meeting.is_single and meeting.max_nodes == 1 and "alone" in warnings[0]
    with pytest.raises(ConfigError, match="which port"):
        meeting_of(*C10D, "--nnodes=2", "--rdzv-endpoint=localhost:0")


def test_c10d_says_what_it_does_not_heed() -> None:
    argv = (*C10D, "--nnodes=2", "--rdzv-endpoint=h", "--node-rank=5", "--master-addr=x")
    meeting, warnings = meeting_of(*argv)
    assert meeting.node_rank is None
    assert "--master-addr" in warnings[0] and "--node-rank 5" in warnings[1]


@pytest.mark.parametrize("argv", [(*C10D, "--rdzv-conf=store_type=file"), ("--rdzv-backend=etcd",)])
def test_not_supported(argv: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        meeting_of(*argv)
    assert error.value.exit_status == 2


def test_conf_is_read_as_torch_reads_it() -> None:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config as theirs

    for text in ("", "a=1", " a = 1 , b = x=y ", "'a=1,b=2'", "a==", "a=b=c,d=e"):
        assert parse_conf(text) == theirs(text)
    for text in ("a", "a=", "=1", "a=1,", ",", "a=1,b"):
        with pytest.raises(ValueError):
            theirs(text)
        with pytest.raises(ConfigError, match="--rdzv-conf"):
            parse_conf(text)


def test_timing() -> None:
    assert read_timing({}, "c10d") == (600.0, 30.0, 5.0, 3, 20)
    conf = parse_conf("join_timeout=1.5,last_call_timeout=0,keep_alive_max_attempt=1,max_membership_changes=0")
    assert read_timing(conf, "c10d") == (1.5, 0.0, 5.0, 1, 0)


def test_static_gathers_for_the_timeout() -> None:
    assert read_timing({}, "static").join_timeout_s == 900
    assert read_timing({"timeout": "5"}, "static").join_timeout_s == 5
    assert read_timing({"timeout": "5", "join_timeout": "6"}, "static").join_timeout_s == 6
    assert read_timing({"timeout": "5'"}, "c10d").join_timeout_s == 600  # not looked at


@pytest.mark.parametrize(
    "text",
    ["join_timeout=0", "join_timeout=-1", "join_timeout=x", "last_call_timeout=nan", "keep_alive_interval=0",
     "keep_alive_max_attempt=0", "keep_alive_max_attempt=1.5", "max_membership_changes=-1"],
)  # fmt: skip
def test_wrong_numbers_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_timing(parse_conf(text), "c10d")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("t", True), ("0", False), ("FALSE", False)]
)
def test_is_host(text: str, value: bool) -> None:
    assert read_is_host({"is_host": text}) is value
    assert read_is_host({}) is None
    with pytest.raises(ConfigError, match="is_host"):
        read_is_host({"is_host": text + "!"})


def test_port_range() -> None:
    assert read_port_range({}) is None
    assert read_port_range({"port_range": "30000-30001"}) == (30000, 30001)
    for text in ("1", "5-4", "0-3", "1-65536", "a-b", "1-"):
        with pytest.raises(ConfigError, match="port_range"):
            read_port_range({"port_range": text})
