"""The jars of a real HDFS, fetched once with pip and apt, verified by checksum and kept in the user's cache.

`fetch_kit()` returns the class path. Hadoop 2.7.3 comes from the sdist of pyspark 2.4.8, the last one with the
classes of a NameNode. Its WebHDFS also needs jersey 1 and asm, from Debian. Two small jars are built here: empty
web applications, which the NameNode requires, and a socket factory (javac), which gives each DataNode of one
machine its own address.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import ConfigError

NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
SDIST = "pyspark==2.4.8"
FETCH_LIMIT_S = 300.0  # 220 MB of sdist; 15 to 25 s on a fast connection
# Needed to build the sdist's metadata, which pip does even for a download.
BUILD_TOOLS = ("setuptools<70", "wheel")

# Jar -> SHA-256, all in the sdist's directory deps/jars.
PYSPARK_JARS: Mapping[str, str] = {
    "activation-1.1.1.jar": "ae475120e9fcd99b4b00b38329bd61cdc5eb754eee03fe66c01f50e137724f99",
    "commons-cli-1.2.jar": "e7cd8951956d349b568b7ccfd4f5b2529a8c113e67c32b028f52ffda371259d9",
    "commons-codec-1.10.jar": "4241dfa94e711d435f29a4604a3e2de5c4aa3c165e23bd066be6fc1fc4309569",
    "commons-collections-3.2.2.jar": "eeeae917917144a68a741d4c0dff66aa5c5c5fd85593ff217bced3fc8ca783b8",
    "commons-configuration-1.6.jar": "46b71b9656154f6a16ea4b1dc84026b52a9305f8eff046a2b4655fa1738e5eee",
    "commons-io-2.4.jar": "cc6a41dc3eaacc9e440a6bd0d2890b20d36b4ee408fe2d67122f328bb6e01581",
    "commons-lang-2.6.jar": "50f11b09f877c294d56f24463f47d28f929cf5044f648661c0f0cfbae9a2f49c",
    "commons-logging-1.1.3.jar": "70903f6fc82e9908c8da9f20443f61d90f0870a312642991fe8462a0b9391784",
    "guava-14.0.1.jar": "d69df3331840605ef0e5fe4add60f2d28e870e3820937ea29f713d2035d9ab97",
    "hadoop-annotations-2.7.3.jar": "d59b24615f1e1050e4bc987955a936f479a51058ae2ee59d751536ae75e563d1",
    "hadoop-auth-2.7.3.jar": "1d75f87e433c285ed99bee878bad6f251242613fec2fb7e6c544b862f3ddc428",
    "hadoop-common-2.7.3.jar": "b7698cbbcfaf93818f2388db63198948bba5f24bd9a2b378c0081f6d945c30a4",
    "hadoop-hdfs-2.7.3.jar": "31c486a5f7df9d28a4a0951e3837d7fa7091b3cf86847011c09c2fc445f43fc6",
    "htrace-core-3.1.0-incubating.jar": "d96c869afaf65315ece8ca09673b187557e9dbaad31df24467a5aa759812188d",
    "httpclient-4.5.6.jar": "c03f813195e7a80e3608d0ddd8da80b21696a4c92a6a2298865bf149071551c7",
    "httpcore-4.4.10.jar": "78ba1096561957db1b55200a159b648876430342d15d461277e62360da19f6fd",
    "jackson-core-asl-1.9.13.jar": "440a9cb5ca95b215f953d3a20a6b1a10da1f09b529a9ddea5f8a4905ddab4f5a",
    "jackson-mapper-asl-1.9.13.jar": "74e7a07a76f2edbade29312a5a2ebccfa019128bc021ece3856d76197e9be0c2",
    "javax.servlet-api-3.1.0.jar": "af456b2dd41c4e82cf54f3e743bc678973d9fe35bd4d3071fa05c7e5333b8482",
    "jaxb-api-2.2.2.jar": "30233df6215fb982d8784de91d307596748cea98d6d502293c7c3e85c1697137",
    "jetty-6.1.26.jar": "21091d3a9c1349f640fdc421504a604c040ed89087ecc12afbe32353326ed4e5",
    "jetty-util-6.1.26.jar": "9b974ce2b99f48254b76126337dc45b21226f383aaed616f59780adaf167c047",
    "log4j-1.2.17.jar": "1d31696445697720527091754369082a6651bd49781b6005deb94e56753406f9",
    "netty-all-4.1.47.Final.jar": "ab96faf902c8a24057a00c75d43643b995cd48fac2811d37c0129d0d21d5c014",
    "protobuf-java-2.5.0.jar": "e0c1c64575c005601725e7c6a02cebf9e1285e888f756b2a1d73ffa8d725cc74",
    "slf4j-api-1.7.16.jar": "e56288031f5e60652c06e7bb6e9fa410a61231ab54890f7b708fc6adc4107c5b",
    "slf4j-log4j12-1.7.16.jar": "9dd065184eaaa0e92bb9d4b82d036456cbbb0e09b8c7eaed6ac59b8cfe9fe429",
    "xmlenc-0.52.jar": "282ae185fc2ff27da7714af9962897c09cfefafb88072219c4a2f9c73616c026",
}
# Jar in /usr/share/java -> (Debian package, SHA-256).
DEBIAN_JARS: Mapping[str, tuple[str, str]] = {
    "asm-9.4.jar": ("libasm-java", "ecddbbbf72d66895af4bd5d0fac7cfa185597fce98364c965d231a762497b942"),
    "jersey1-core.jar": (
        "libjersey1-core-java",
        "c84343e1a6f1b0df554cf6d8be51ea3f02144b9984c2fc5c1f9ce27b44379e8b",
    ),
    "jersey1-server.jar": (
        "libjersey1-server-java",
        "e02373601e515f360d9ee13237b8252de92d9a49c89ab7bfb174172f2f1b5956",
    ),
    "jersey1-servlet.jar": (
        "libjersey1-servlet-java",
        "595dbd077d7b37c8684e14df02549c3687f1612ac74cc02ba4d21d9f9da95838",
    ),
    "jsr311-api-1.1.1.jar": (
        "libjsr311-api-java",
        "c5f6cd0daadf7508763b22c91c55e64b0bb46bafec69fab7df3c05e3d319e169",
    ),
}

SOCKET_FACTORY = "bootseer.BoundSocketFactory"
_SOCKET_FACTORY_SOURCE = """
package bootseer;

import java.io.IOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.nio.channels.SocketChannel;

/** Outgoing RPC connections of a DataNode come from its own address: the NameNode knows it by that. */
public class BoundSocketFactory extends javax.net.SocketFactory {
    public Socket createSocket() throws IOException {
        Socket socket = SocketChannel.open().socket();
        socket.bind(new InetSocketAddress(System.getProperty("bootseer.address"), 0));
        return socket;
    }
    public Socket createSocket(String host, int port) throws IOException {
        return connect(new InetSocketAddress(host, port));
    }
    public Socket createSocket(InetAddress host, int port) throws IOException {
        return connect(new InetSocketAddress(host, port));
    }
    public Socket createSocket(String host, int port, InetAddress from, int fromPort) throws IOException {
        return createSocket(host, port);
    }
    public Socket createSocket(InetAddress host, int port, InetAddress from, int fromPort) throws IOException {
        return createSocket(host, port);
    }
    private Socket connect(InetSocketAddress address) throws IOException {
        Socket socket = createSocket();
        socket.connect(address);
        return socket;
    }
    public boolean equals(Object other) { return other instanceof BoundSocketFactory; }
    public int hashCode() { return 1; }
}
"""
_WEB_XML = '<?xml version="1.0"?>\n<web-app xmlns="http://java.sun.com/xml/ns/javaee" version="2.5"/>\n'
_LOG4J = """log4j.rootLogger=INFO, console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""
_METRICS = "*.period=1\n"  # seconds: how often a server renews the counts that it shows; 10 without this


def why_not() -> str:
    """Return why a real HDFS cannot run here, "" if it can. It only searches for programs."""
    for program, package in (("java", "openjdk-17-jre-headless"), ("javac", "openjdk-17-jdk-headless")):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: apt-get install {package})"
    return ""


class Kit(NamedTuple):
    """The files from which a cluster is started."""

    jars: list[str]
    formatted: str  # the name directory of an empty file system, to copy: creating one takes a Java start


def fetch_kit() -> Kit:
    """Return the kit from the cache or, the first time, from PyPI and Debian.

    Raises: ConfigError with the missing program or the failure.
    """
    if reason := why_not():
        raise ConfigError(f"no HDFS can be started: {reason}")
    directory = os.path.join(_cache_directory(), "minihdfs")
    os.makedirs(directory, exist_ok=True)
    wanted = os.path.join(directory, _recipe_digest())
    with open(os.path.join(directory, "lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second test run waits for the first one's download
        if not os.path.isdir(wanted):
            with tempfile.TemporaryDirectory(dir=directory, prefix="new-") as made:
                kit = os.path.join(made, "kit")
                jars = os.path.join(kit, "jars")
                os.makedirs(jars)
                _take_from_pypi(jars, made)
                _take_from_debian(jars, made)
                _make_resources(os.path.join(jars, "bootseer-resources.jar"))
                _compile_socket_factory(jars, made)
                _format(_list_jars(kit), os.path.join(kit, "name"), made)
                os.rename(kit, wanted)
    return Kit(_list_jars(wanted), os.path.join(wanted, "name"))


def _list_jars(kit: str) -> list[str]:
    return sorted(os.path.join(kit, "jars", name) for name in os.listdir(os.path.join(kit, "jars")))


def _cache_directory() -> str:
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "bootseer")


def _recipe_digest() -> str:
    recipe = (
        sorted(PYSPARK_JARS.items()),
        sorted(DEBIAN_JARS.items()),
        _SOCKET_FACTORY_SOURCE,
        _WEB_XML,
        _LOG4J,
        _METRICS,
    )
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]


def _take_from_pypi(jars: str, work: str) -> None:
    tools, downloads = os.path.join(work, "tools"), os.path.join(work, "downloads")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "install", "--target", tools, *BUILD_TOOLS], "pip could not fetch what building a sdist needs")
    _run(
        [*pip, "download", "--no-deps", "--no-binary=:all:", "--no-build-isolation", "--dest", downloads, SDIST],
        f"pip could not download {SDIST}",
        environ={**os.environ, "PYTHONPATH": tools},
    )
    (name,) = os.listdir(downloads)
    root = name.removesuffix(".tar.gz")
    missing = {f"{root}/deps/jars/{jar}": jar for jar in PYSPARK_JARS}
    with tarfile.open(os.path.join(downloads, name)) as archive:
        for member in archive:
            jar = missing.pop(member.name, None)
            content = archive.extractfile(member) if jar and member.isfile() else None
            if jar and content:
                with content, open(os.path.join(jars, jar), "wb") as out:
                    shutil.copyfileobj(content, out)
                _check(os.path.join(jars, jar), PYSPARK_JARS[jar], SDIST)
            if not missing:
                return
    raise ConfigError(f"no HDFS can be started: {SDIST} has no {', '.join(sorted(missing.values()))}")


def _take_from_debian(jars: str, work: str) -> None:
    directory = os.path.join(work, "debian")
    os.mkdir(directory)
    packages = sorted({package for package, _ in DEBIAN_JARS.values()})
    _run(
        ["apt-get", "download", "-qq", *packages],
        f"apt-get could not download {', '.join(packages)} (as root, apt-get update makes its lists new)",
        cwd=directory,
    )
    for name in sorted(os.listdir(directory)):
        _run(["dpkg-deb", "-x", name, "files"], f"dpkg-deb could not unpack {name}", cwd=directory)
    for jar, (package, digest) in DEBIAN_JARS.items():
        try:
            shutil.copyfile(os.path.join(directory, "files/usr/share/java", jar), os.path.join(jars, jar))
        except OSError as error:
            raise ConfigError(f"no HDFS can be started: Debian's {package} has no {jar} ({error})") from error
        _check(os.path.join(jars, jar), digest, f"Debian's {package}")


def _check(path: str, digest: str, origin: str) -> None:
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        name = os.path.basename(path)
        raise ConfigError(
            f"no HDFS can be started: {name} from {origin} has SHA-256 {found}, expected {digest}: "
            "another version than the tested one"
        )


def _make_resources(path: str) -> None:
    with zipfile.ZipFile(path, "w") as jar:
        # Directories need their own entries: jetty finds them by name.
        for directory in ("webapps", "webapps/hdfs", "webapps/datanode", "webapps/static"):
            jar.writestr(f"{directory}/", "")
        for name in ("hdfs", "datanode"):
            jar.writestr(f"webapps/{name}/WEB-INF/web.xml", _WEB_XML)
        jar.writestr("log4j.properties", _LOG4J)
        jar.writestr("hadoop-metrics2.properties", _METRICS)


def _compile_socket_factory(jars: str, work: str) -> None:
    source, classes = os.path.join(work, "BoundSocketFactory.java"), os.path.join(work, "classes")
    with open(source, "w", encoding="utf-8") as file:
        file.write(_SOCKET_FACTORY_SOURCE)
    _run(["javac", "-nowarn", "-d", classes, source], "javac could not compile the socket factory")
    with zipfile.ZipFile(os.path.join(jars, "bootseer-sockets.jar"), "w") as jar:
        name = SOCKET_FACTORY.replace(".", "/") + ".class"
        jar.write(os.path.join(classes, name), name)


def _format(jars: Sequence[str], directory: str, work: str) -> None:
    java = ["java", f"-Djava.io.tmpdir={work}", "-cp", ":".join(jars), NAMENODE]
    settings = {"fs.defaultFS": "hdfs://127.0.0.1:8020", "dfs.namenode.name.dir": f"file://{directory}"}
    flags = [flag for key, value in settings.items() for flag in ("-D", f"{key}={value}")]
    wanted = ["-format", "-force", "-nonInteractive", "-clusterid", "mini"]
    _run([*java, *flags, *wanted], "the NameNode could not format a file system")


def _run(
    argv: Sequence[str], failed: str, cwd: str | None = None, environ: Mapping[str, str] | None = None
) -> None:
    try:
        done = subprocess.run(
            argv,
            check=False,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=FETCH_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"no HDFS can be started: {failed}: {error}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise ConfigError(f"no HDFS can be started: {failed}: {said}")
