"""Which HDFS a URL means, with and without Hadoop's configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.errors import ConfigError
from bootseer.storage.hdfs.conf import read_address, read_conf

USER = {"HADOOP_USER_NAME": "ada"}


def write_conf(directory: Path, **files: dict[str, str]) -> dict[str, str]:
    """An environment whose configuration has these settings."""
    for name, settings in files.items():
        entries = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in settings.items())
        (directory / f"{name}-site.xml").write_text(f"<configuration>{entries}</configuration>")
    return {**USER, "HADOOP_CONF_DIR": str(directory)}


def test_host_and_port() -> None:
    found = read_address("hdfs://nn:8020/a/b/", {}, USER)
    assert (found.url, found.folder, found.native, found.rpc) == (
        "hdfs://nn:8020/a/b",
        "/a/b",
        "hdfs://nn:8020",
        "nn:8020",
    )
    assert (found.namenodes, found.is_guessed) == (("nn:9870", "nn:50070"), True)
    assert (found.user, found.tls) == ("ada", False)


@pytest.mark.parametrize("host", ["nn", "[::1]"])
def test_a_host_alone_is_asked_at_the_port_of_hadoop(tmp_path: Path, host: str) -> None:
    found = read_address(f"hdfs://{host}/a", {}, USER)
    assert (found.url, found.native, found.rpc) == (f"hdfs://{host}/a", f"hdfs://{host}:8020", f"{host}:8020")
    assert found.namenodes == (f"{host}:9870", f"{host}:50070")
    hdfs = {"dfs.namenode.http-address": "0.0.0.0:1111", "dfs.nameservices": "east, west"}
    environ = write_conf(tmp_path, core={"fs.defaultFS": f"hdfs://{host}"}, hdfs=hdfs)
    for url in (f"hdfs://{host}:8020/a", f"hdfs://{host}/a"):
        assert read_address(url, {}, environ).namenodes == (f"{host}:1111",)
    assert read_address("hdfs://west/a", {}, environ).native == "hdfs://west"


def test_names_are_taken_as_they_are_written() -> None:
    assert read_address("hdfs://nn:8020/100%41/what?/a#b", {}, USER).folder == "/100%41/what?/a#b"


def test_root() -> None:
    for url in ("hdfs://nn:8020", "hdfs://nn:8020/", "webhdfs://nn:9870//"):
        assert read_address(url, {}, USER).folder == ""


def test_user_and_no_password() -> None:
    found = read_address("hdfs://eve:secret@nn:8020/x", {}, USER)
    assert found.user == "eve"
    assert "secret" not in repr(found)
    assert read_address("hdfs://eve@nn:8020/x", {"user": "bob"}, USER).user == "bob"


def test_web_servers_that_are_named() -> None:
    named = read_address("hdfs://nn:8020/x", {"web": "proxy:1234"}, USER)
    assert (named.namenodes, named.is_guessed) == (("proxy:1234",), False)
    assert read_address("hdfs://nn:8020/x", {"web": ""}, USER).namenodes == ()


def test_webhdfs() -> None:
    found = read_address("webhdfs://nn:50070/x", {}, USER)
    assert (found.native, found.namenodes, found.is_guessed, found.tls) == ("", ("nn:50070",), False, False)
    assert read_address("webhdfs://nn/x", {}, USER).namenodes == ("nn:9870",)
    assert read_address("swebhdfs://nn/x", {}, USER).namenodes == ("nn:9871",)
    assert read_address("swebhdfs://nn/x", {}, USER).tls


def test_viewfs_has_no_web_server() -> None:
    found = read_address("viewfs://cluster/x", {}, USER)
    assert (found.native, found.namenodes, found.folder) == ("viewfs://cluster", (), "/x")


def test_default_file_system(tmp_path: Path) -> None:
    environ = write_conf(tmp_path, core={"fs.defaultFS": "hdfs://nn:8020"})
    found = read_address("hdfs:///x", {}, environ)
    assert (found.url, found.native) == ("hdfs://nn:8020/x", "hdfs://nn:8020")


def test_web_server_of_the_configuration(tmp_path: Path) -> None:
    hdfs = {"dfs.namenode.http-address": "0.0.0.0:1111"}
    environ = write_conf(tmp_path, core={"fs.defaultFS": "hdfs://nn:8020"}, hdfs=hdfs)
    assert read_address("hdfs://nn:8020/x", {}, environ).namenodes == ("nn:1111",)
    assert read_address("hdfs://other:8020/x", {}, environ).is_guessed


def test_nameservice_with_two_namenodes(tmp_path: Path) -> None:
    settings = {
        "dfs.ha.namenodes.prod": "a, b",
        "dfs.namenode.http-address.prod.a": "host1:9870",
        "dfs.namenode.http-address.prod.b": "host2:9870",
        "dfs.namenode.https-address.prod.a": "host1:9871",
    }
    environ = write_conf(tmp_path, hdfs=settings)
    found = read_address("hdfs://prod/x", {}, environ)
    assert (found.native, found.rpc) == ("hdfs://prod", "prod")
    assert (found.namenodes, found.is_guessed) == (("host1:9870", "host2:9870"), False)
    assert read_address("webhdfs://prod/x", {}, environ).namenodes == ("host1:9870", "host2:9870")
    assert read_address("swebhdfs://prod/x", {}, environ).namenodes == ("host1:9871",)
    environ = write_conf(tmp_path, hdfs={**settings, "dfs.http.policy": "HTTPS_ONLY"})
    assert read_address("hdfs://prod/x", {}, environ)[4:7] == (("host1:9871",), False, True)


@pytest.mark.parametrize(
    "settings", [{"hadoop.security.authentication": "kerberos"}, {"dfs.webhdfs.enabled": "false"}]
)
def test_no_web_server_with_kerberos_or_switched_off(tmp_path: Path, settings: dict[str, str]) -> None:
    environ = write_conf(tmp_path, core=settings)
    assert read_address("hdfs://nn:8020/x", {}, environ).namenodes == ()


def test_configuration_below_hadoop_home(tmp_path: Path) -> None:
    (tmp_path / "etc/hadoop").mkdir(parents=True)
    write_conf(tmp_path / "etc/hadoop", core={"fs.defaultFS": "hdfs://home:8020"})
    found = read_address("hdfs:///x", {}, {**USER, "HADOOP_HOME": str(tmp_path)})
    assert found.native == "hdfs://home:8020"


def test_no_configuration_is_an_empty_one(tmp_path: Path) -> None:
    assert read_conf("") == read_conf(str(tmp_path)) == read_conf(str(tmp_path / "missing")) == {}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hdfs:///x", "no NameNode is named"),
        ("webhdfs:///x", "no NameNode is named"),
        ("hdfs://nn:port/x", "the port is not a number"),
        ("hdfs://nn:70000/x", "the port is not a number"),
        ("hdfs://nn:0/x", "the port is not a number"),
    ],
)
def test_what_cannot_be(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_address(url, {}, USER)


def test_broken_configuration_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "core-site.xml").write_text("<configuration><property>")
    with pytest.raises(ConfigError, match=r"core-site\.xml cannot be read"):
        read_address("hdfs:///x", {}, {**USER, "HADOOP_CONF_DIR": str(tmp_path)})


def conf_of(directory: Path, **files: str) -> dict[str, str]:
    for name, body in files.items():
        text = f'<?xml version="1.0"?><configuration xmlns:xi="http://www.w3.org/2001/XInclude">{body}</configuration>'
        (directory / f"{name.replace('_', '-')}.xml").write_text(text)
    return read_conf(str(directory))


def prop(name: str, value: str, more: str = "") -> str:
    return f"<property><name>{name}</name><value>{value}</value>{more}</property>"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("hdfs://${nn}:8020", "hdfs://host1:8020"),
        ("${deep}/x", "host1.site/x"),
        ("${env.PLACE}", "rack7"),
        ("${env.NONE-here}", "here"),
        ("${env.EMPTY-here}", ""),
        ("${env.EMPTY:-here}", "here"),
        ("${unknown}-${nn}", "${unknown}-host1"),
        ("$nn", "$nn"),
    ],
)
def test_values_that_refer_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, expected: str
) -> None:
    monkeypatch.setenv("PLACE", "rack7")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("NONE", raising=False)
    body = prop("nn", "host1") + prop("deep", "${nn}.site") + prop("it", value)
    assert conf_of(tmp_path, core_site=body)["it"] == expected


def test_a_value_that_refers_to_itself_ends(tmp_path: Path) -> None:
    assert conf_of(tmp_path, core_site=prop("a", "${b}") + prop("b", "${a}"))["a"] in ("${a}", "${b}")


def test_files_that_are_included(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "names.xml").write_text(f"<configuration>{prop('nn', 'host2')}</configuration>")
    include = '<xi:include href="parts/names.xml"/>'
    missing = '<xi:include href="none.xml"><xi:fallback>' + prop("other", "1") + "</xi:fallback></xi:include>"
    found = conf_of(tmp_path, core_site=prop("nn", "host1") + include + missing + prop("it", "${nn}"))
    assert found == {"nn": "host2", "other": "1", "it": "host2"}
    with pytest.raises(ConfigError, match=r"none\.xml"):
        conf_of(tmp_path, core_site='<xi:include href="none.xml"/>')
    with pytest.raises(ConfigError, match="does it include itself"):
        conf_of(tmp_path, core_site='<xi:include href="core-site.xml"/>')


def test_a_final_value_stays(tmp_path: Path) -> None:
    first = prop("a", "1", "<final>true</final>")
    assert conf_of(tmp_path, core_site=first, hdfs_site=prop("a", "2"))["a"] == "1"
