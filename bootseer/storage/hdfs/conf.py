"""The HDFS that a URL names: the address for the native client, and the location of WebHDFS.

Reads Hadoop's configuration ($HADOOP_CONF_DIR, else $HADOOP_HOME/etc/hadoop), as hdfs-native does. Without one, it
guesses the default web ports of Hadoop 3 and Hadoop 2.
"""

from __future__ import annotations

import getpass
import os
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from bootseer.errors import ConfigError

DEFAULT_WEB_PORTS = (9870, 50070)  # Hadoop 3, Hadoop 2
DEFAULT_TLS_PORT = 9871
MAX_INCLUDED = 8  # nested includes
MAX_SUBSTITUTED = 20  # as Hadoop
INCLUDE = "{http://www.w3.org/2001/XInclude}include"
FALLBACK = "{http://www.w3.org/2001/XInclude}fallback"
_REFERENCE = re.compile(r"\$\{([^{}\s$]+)\}")
DEFAULT_RPC_PORT = 8020  # hdfs-default.xml of Hadoop 3: dfs.namenode.rpc-address


class HdfsAddress(NamedTuple):
    url: str  # without user
    folder: str  # absolute, "" for the root
    native: str  # hdfs://HOST:PORT or hdfs://NAMESERVICE; "" when only WebHDFS is to be used
    rpc: str  # the NameNode that DataNodes call: HOST:PORT or NAMESERVICE; "" if unknown
    namenodes: tuple[str, ...]  # HOST:PORT of web servers; () when WebHDFS cannot be used
    is_guessed: bool  # the web servers are guesses and may not exist
    tls: bool
    user: str
    has_permissions: bool = True  # False: the configuration lets all users write everywhere


def read_address(url: str, options: Mapping[str, object], environ: Mapping[str, str]) -> HdfsAddress:
    """Parse `url` (hdfs, viewfs, webhdfs or swebhdfs).

    Options: `web` (HOST:PORT of the NameNode's web server, "" for no WebHDFS), `conf_folder`, `user`.
    """
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    authority, _, path = rest.partition("/")  # the path is not decoded
    named_user, _, netloc = authority.rpartition("@")
    conf_folder = str(options.get("conf_folder") or _find_conf_directory(environ))
    conf = read_conf(conf_folder)
    named = options.get("user") or unquote(named_user.partition(":")[0]) or environ.get("HADOOP_USER_NAME")
    user = str(named or getpass.getuser())
    has_permissions = conf.get("dfs.permissions.enabled", "true").lower() != "false"
    directory = "/" + path.strip("/") if path.strip("/") else ""
    shown = f"{scheme}://{netloc}{directory}"
    port = _port_of(netloc)
    if port is not None and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ConfigError(f"{scheme}://{netloc}: the port is not a number from 1 to 65535")
    if scheme == "viewfs":
        return HdfsAddress(shown, directory, f"viewfs://{netloc}", "", (), False, False, user, has_permissions)
    if scheme in ("webhdfs", "swebhdfs"):
        tls = scheme == "swebhdfs"
        if port is None and (nodes := _web_of_nameservice(conf, netloc, tls)):
            return HdfsAddress(shown, directory, "", netloc, nodes, False, tls, user, has_permissions)
        if not netloc:
            raise ConfigError(f"{shown}: no NameNode is named: {scheme}://HOST:PORT/PATH")
        default = DEFAULT_TLS_PORT if tls else DEFAULT_WEB_PORTS[0]
        node = netloc if port is not None else f"{netloc}:{default}"
        return HdfsAddress(shown, directory, "", "", (node,), False, tls, user, has_permissions)
    if not netloc:
        netloc = urlsplit(conf.get("fs.defaultFS", "")).netloc
        if not netloc:
            raise ConfigError(
                f"{url}: no NameNode is named, and there is no fs.defaultFS: set HADOOP_CONF_DIR,"
                " or write hdfs://HOST:PORT/PATH"
            )
        shown = f"hdfs://{netloc}{directory}"
    node = _with_port(conf, netloc)
    web, is_guessed, tls = _web_of_hdfs(conf, netloc, options)
    return HdfsAddress(shown, directory, f"hdfs://{node}", node, web, is_guessed, tls, user, has_permissions)


def read_conf(directory: str) -> dict[str, str]:
    """Return the settings of core-site.xml and hdfs-site.xml in a directory; a missing file counts as empty."""
    found: dict[str, str] = {}
    final: set[str] = set()
    for name in ("core-site.xml", "hdfs-site.xml"):
        path = os.path.join(directory, name) if directory else ""
        if path and os.path.isfile(path):
            _read_file(path, found, final, MAX_INCLUDED)
    return {name: _substituted(value, found, os.environ) for name, value in found.items()}


def _read_file(path: str, found: dict[str, str], final: set[str], depth: int) -> None:
    """Read one file with its includes, in place.

    Args: final: names whose values stay fixed.
    """
    try:
        root = ElementTree.parse(path).getroot()  # noqa: S314  the user's own configuration
    except (OSError, ElementTree.ParseError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    _read_entries(root, path, found, final, depth)


def _read_entries(
    above: ElementTree.Element, path: str, found: dict[str, str], final: set[str], depth: int
) -> None:
    for entry in above:
        if entry.tag == "property":
            key, value = entry.findtext("name"), entry.findtext("value")
            name = (key or "").strip()
            if name and value is not None and name not in final:
                found[name] = value.strip()
            if name and (entry.findtext("final") or "").strip() == "true":
                final.add(name)
        elif entry.tag == "configuration":
            _read_entries(entry, path, found, final, depth)
        elif entry.tag == INCLUDE:
            included = os.path.join(os.path.dirname(path), entry.get("href", "").removeprefix("file://"))
            if depth == 0:
                raise ConfigError(
                    f"{path}: {included} is included more than {MAX_INCLUDED} deep: does it include itself?"
                )
            fallback = entry.find(FALLBACK)
            if os.path.isfile(included) or fallback is None:
                _read_file(included, found, final, depth - 1)
            else:
                _read_entries(fallback, path, found, final, depth)


def _substituted(value: str, conf: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Expand ${other.property}, ${env.VARIABLE} and ${env.VARIABLE:-default}, as Hadoop does.

    Unknown references stay unchanged.
    """
    for _ in range(MAX_SUBSTITUTED):
        known = ((each, _meaning(each[1], conf, environ)) for each in _REFERENCE.finditer(value))
        match, meaning = next(((each, text) for each, text in known if text is not None), (None, ""))
        if match is None:
            break
        value = value[: match.start()] + meaning + value[match.end() :]
    return value


def _meaning(name: str, conf: Mapping[str, str], environ: Mapping[str, str]) -> str | None:
    if not name.startswith("env."):
        return environ.get("USER") if name == "user.name" else conf.get(name)
    variable, dash, default = name[4:].partition("-")
    is_empty_unset = variable.endswith(":")
    found = environ.get(variable.removesuffix(":"))
    if dash and (found is None or (is_empty_unset and not found)):
        return default
    return found


def _find_conf_directory(environ: Mapping[str, str]) -> str:
    if directory := environ.get("HADOOP_CONF_DIR"):
        return directory
    home = environ.get("HADOOP_HOME")
    return os.path.join(home, "etc/hadoop") if home else ""


def _web_of_hdfs(
    conf: Mapping[str, str], netloc: str, options: Mapping[str, object]
) -> tuple[tuple[str, ...], bool, bool]:
    """Return the web servers of an hdfs:// address, whether they are guesses, and whether they require TLS."""
    tls = conf.get("dfs.http.policy", "").upper() == "HTTPS_ONLY"
    if (web := options.get("web")) is not None:
        return ((str(web),) if web else ()), False, tls
    if conf.get("hadoop.security.authentication", "simple").lower() != "simple":
        return (), False, tls  # Bootseer has no Kerberos for HTTP; the native client has it
    if conf.get("dfs.webhdfs.enabled", "true").lower() == "false":
        return (), False, tls
    port = _port_of(netloc) or ""
    host = netloc.removesuffix(f":{port}") if port else netloc
    if not port and (nodes := _web_of_nameservice(conf, netloc, tls)):
        return nodes, False, tls
    configured = _web_value(conf, "", tls)
    if configured and _is_namenode(conf, netloc):
        named, _, web_port = configured.rpartition(":")
        return (f"{host if named in ('', '0.0.0.0') else named}:{web_port}",), False, tls  # noqa: S104
    return tuple(f"{host}:{guess}" for guess in DEFAULT_WEB_PORTS), True, False


def _port_of(netloc: str) -> str | None:
    """Return the text in place of a port, ignoring colons in the brackets of an IPv6 address."""
    return netloc.rpartition(":")[2] if re.search(r":[^:\]]*$", netloc) else None


def _with_port(conf: Mapping[str, str], netloc: str) -> str:
    """Return a NameNode with its port; a nameservice has none and stays unchanged."""
    services = {name.strip() for name in conf.get("dfs.nameservices", "").split(",")}
    is_service = netloc in services or f"dfs.ha.namenodes.{netloc}" in conf
    return f"{netloc}:{DEFAULT_RPC_PORT}" if _port_of(netloc) is None and not is_service else netloc


def _is_namenode(conf: Mapping[str, str], netloc: str) -> bool:
    """Return whether this is the configuration's single NameNode."""
    named = (conf.get("dfs.namenode.rpc-address", ""), urlsplit(conf.get("fs.defaultFS", "")).netloc)
    return _with_port(conf, netloc) in [_with_port(conf, each) for each in named if each]


def _web_of_nameservice(conf: Mapping[str, str], nameservice: str, tls: bool) -> tuple[str, ...]:
    names = [name.strip() for name in conf.get(f"dfs.ha.namenodes.{nameservice}", "").split(",") if name.strip()]
    found = (_web_value(conf, f".{nameservice}.{name}", tls) for name in names)
    return tuple(value for value in found if value)


def _web_value(conf: Mapping[str, str], suffix: str, tls: bool) -> str:
    return conf.get(f"dfs.namenode.{'https' if tls else 'http'}-address{suffix}", "")
