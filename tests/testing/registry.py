"""A real registry on the loopback for tests: Debian's docker-registry with TLS, and a password or tokens.

`with RegistryServer(folder) as registry:` gives `registry.host`; `registry.options()` are the options of a store
or a Registry for it. The certificate is from its own authority. The password is in a file as `docker login` writes
it. The server ends with the program that started it, even if that is killed.
"""

from __future__ import annotations

import base64
import datetime
import http.client
import ipaddress
import json
import os
import secrets
import shutil
import socket
import ssl
import time
from types import TracebackType
from typing import Any, NamedTuple

from bootseer.errors import BootseerError
from tests.testing.minihdfs_nodes import Server, Starter

PROGRAM = "docker-registry"
READY_LIMIT_S = 20.0
_ADDRESS = "127.0.0.1"


class RegistryServerError(BootseerError):
    """The registry of a test did not start."""


class Certificates(NamedTuple):
    """Paths of PEM files."""

    ca: str  # of the authority
    certificate: str  # for 127.0.0.1 and localhost
    key: str  # of the certificate

    def server_context(self) -> ssl.SSLContext:
        """Return a TLS context for servers of tests."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


class TokenIssuer(NamedTuple):
    """The issuer of tokens that a registry accepts."""

    realm: str  # URL
    service: str
    issuer: str
    certificate: str  # path of the certificate that signs them


def why_not() -> str:
    """Return why no registry can run here, "" if one can."""
    return "" if shutil.which(PROGRAM) else f"{PROGRAM} is not installed (apt-get install {PROGRAM})"


class RegistryServer:
    """A registry whose files are in `folder`; a context manager.

    Args:
        has_tls: otherwise it uses plain HTTP.
        certificates: by default created in `folder`.
        tokens: issuer of the required tokens; without it the password is required, if `has_password`.
    """

    user = "somebody"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        has_tls: bool = True,
        certificates: Certificates | None = None,
        has_password: bool = True,
        tokens: TokenIssuer | None = None,
    ) -> None:
        if reason := why_not():
            raise RegistryServerError(reason)
        self._directory = os.path.abspath(folder)
        os.makedirs(self._directory, exist_ok=True)
        self.certificates = (certificates or make_certificates(self._directory)) if has_tls else None
        self.password = secrets.token_hex(8) if has_password else ""
        self._tokens = tokens
        self._starter = Starter()
        self.host = ""

    def __enter__(self) -> RegistryServer:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self.host:
            self._server.kill()
        self._starter.close()

    @property
    def auth_file(self) -> str:
        """Return the path of docker's file with the password."""
        return os.path.join(self._directory, "auth.json")

    def options(self) -> dict[str, object]:
        """Return the options for `open_store` and Registry."""
        trusted = {"ca_file": self.certificates.ca} if self.certificates is not None else {}
        return {"auth_file": self.auth_file, "certs_folders": [], "mirrors": "", "plain_http": "", **trusted}

    def storage_path(self, *names: str) -> str:
        """Return the path of a stored file."""
        return os.path.join(self._directory, "storage", "docker", "registry", "v2", *names)

    def blob_file(self, digest: str) -> str:
        """Return the path of the blob of a digest, which all repositories share."""
        name = digest.removeprefix("sha256:")
        return self.storage_path("blobs", "sha256", name[:2], name, "data")

    def _start(self) -> None:
        write_auth_file(self.auth_file, {})
        for _ in range(5):  # a free port may be taken before it starts
            port = _free_port()
            self.host = f"{_ADDRESS}:{port}"
            if self.password:
                write_auth_file(self.auth_file, {self.host: (self.user, self.password)})
            config = os.path.join(self._directory, "config.yml")
            with open(config, "w", encoding="utf-8") as file:
                json.dump(self._config(port), file)  # which is YAML as well
            log = os.path.join(self._directory, "log")
            self._server = Server(self._starter, PROGRAM, [PROGRAM, "serve", config], log)
            self._server.start()
            if self._wait():
                return
        with open(log, encoding="utf-8", errors="replace") as file:
            raise RegistryServerError(f"{PROGRAM} did not start: {file.read()[-2000:]}")

    def _config(self, port: int) -> dict[str, Any]:
        config: dict[str, Any] = {
            "version": 0.1,
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {
                "filesystem": {"rootdirectory": os.path.join(self._directory, "storage")},
                "delete": {"enabled": True},
                "maintenance": {"uploadpurging": {"enabled": False}},
            },
            "http": {"addr": f"{_ADDRESS}:{port}", "secret": secrets.token_hex(16)},
        }
        if self.certificates is not None:
            config["http"]["tls"] = {
                "certificate": self.certificates.certificate,
                "key": self.certificates.key,
            }
        if self._tokens is not None:
            config["auth"] = {
                "token": {
                    "realm": self._tokens.realm,
                    "service": self._tokens.service,
                    "issuer": self._tokens.issuer,
                    "rootcertbundle": self._tokens.certificate,
                }
            }
        elif self.password:
            path = os.path.join(self._directory, "htpasswd")
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{self.user}:{_bcrypt(self.password)}\n")
            config["auth"] = {"htpasswd": {"realm": "tests", "path": path}}
        return config

    def _wait(self) -> bool:
        """Wait until it answers; return False if it has ended, as its port was taken."""
        end_s = time.monotonic() + READY_LIMIT_S
        while self._server.is_running():
            if self._answers():
                return True
            if time.monotonic() > end_s:
                raise RegistryServerError(f"{PROGRAM} does not answer within {READY_LIMIT_S:g} s")
            time.sleep(0.02)
        return False

    def _answers(self) -> bool:
        connection: http.client.HTTPConnection
        if self.certificates is not None:
            context = ssl.create_default_context(cafile=self.certificates.ca)
            connection = http.client.HTTPSConnection(self.host, timeout=5.0, context=context)
        else:
            connection = http.client.HTTPConnection(self.host, timeout=5.0)
        try:
            connection.request("GET", "/v2/")
            return connection.getresponse().status in (200, 401)
        except OSError:
            return False
        finally:
            connection.close()


def write_auth_file(path: str, passwords: dict[str, tuple[str, str]]) -> None:
    """Write a file as `docker login` does. Args: passwords: host -> user and password."""
    auths = {
        host: {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}
        for host, (user, password) in passwords.items()
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"auths": auths}, file)


def make_certificates(directory: str) -> Certificates:
    """Create an authority, and its certificate for the loopback."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def name_of(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def begin(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name_of(subject))
            .issuer_name(name_of("tests' authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
        )

    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    usage = {
        "digital_signature": True, "content_commitment": False, "key_encipherment": False,
        "data_encipherment": False, "key_agreement": False, "key_cert_sign": True, "crl_sign": True,
        "encipher_only": False, "decipher_only": False,
    }  # fmt: skip
    ca = (
        begin("tests' authority", ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .add_extension(x509.KeyUsage(**usage), True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )
    names = [x509.IPAddress(ipaddress.ip_address(_ADDRESS)), x509.DNSName("localhost")]
    certificate = (
        begin("tests' server", key)
        .add_extension(x509.SubjectAlternativeName(names), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), False)
        .sign(ca_key, hashes.SHA256())
    )
    made = Certificates(*(os.path.join(directory, name) for name in ("ca.crt", "server.crt", "server.key")))
    contents = (
        ca.public_bytes(serialization.Encoding.PEM),
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
    os.makedirs(directory, exist_ok=True)
    for path, content in zip(made, contents, strict=True):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
    return made


def _bcrypt(password: str) -> str:
    """Hash a password as htpasswd does; the registry accepts no other form."""
    import bcrypt

    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(rounds=4)).decode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port
