"""ed25519 as RFC 8032 has it, and keys as OpenSSH writes them."""

from __future__ import annotations

import base64
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError
from bootseer.trust import ed25519
from bootseer.trust.ed25519 import SigningKey, verify
from bootseer.trust.keys import PublicKey, clean_name, parse_public, parse_publics
from tests.support import needs_program

# RFC 8032, 7.1: secret key, public key, message, signature.
RFC = [
    ("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
     "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a", "",
     ("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
      "d25bf5f0595bbe24655141438e7a100b")),
    ("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
     "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c", "72",
     ("92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
      "387b2eaeb4302aeeb00d291612bb0c00")),
    ("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
     "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025", "af82",
     ("6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
      "4a7c15e9716ed28dc027beceea1ec40a")),
]  # fmt: skip


@pytest.mark.parametrize(("secret", "public", "message", "signature"), RFC)
def test_vectors_of_the_rfc(secret: str, public: str, message: str, signature: str) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))
    data, sig = bytes.fromhex(message), bytes.fromhex(signature)
    assert key.public == bytes.fromhex(public)
    assert key.sign(data) == sig
    assert verify(key.public, sig, data)
    for place in range(8 * len(sig)):
        other = bytearray(sig)
        other[place // 8] ^= 1 << place % 8
        assert not verify(key.public, bytes(other), data)
    assert not verify(key.public, sig, data + b"\0")
    assert not verify(SigningKey.make().public, sig, data)


def test_what_cannot_be_a_signature_is_none() -> None:
    key = SigningKey.make()
    sig = key.sign(b"a")
    for wrong in (b"", sig[:-1], sig + b"\0", bytes(64), b"\xff" * 64):
        assert not verify(key.public, wrong, b"a")
    for public in (b"", bytes(31), key.public + b"\0", b"\xff" * 32):
        assert not verify(public, sig, b"a")


def test_private_keys_are_read_as_they_were_written() -> None:
    key = SigningKey.make(name="ada")
    again = SigningKey.from_pem(key.to_pem(), "own.pem")
    assert (again.public, again.keyid) == (key.public, key.keyid)
    assert key.to_pem().startswith(b"-----BEGIN PRIVATE KEY-----")
    secret = base64.b64decode(b"".join(key.to_pem().splitlines()[1:-1]))[-32:]
    for shown in (repr(key), str(key), repr([key]), f"{key}"):
        assert secret.hex() not in shown and key.keyid[:16] in shown


def test_other_private_keys_are_refused() -> None:
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec, ed448
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    own = Ed25519PrivateKey.generate()
    locked = form.BestAvailableEncryption(b"password")
    for data, text in (
        (ec.generate_private_key(ec.SECP256R1()).private_bytes(
            form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()), "of another kind"),
        (ed448.Ed448PrivateKey.generate().private_bytes(
            form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()), "of another kind"),
        (own.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, locked), "not a usable private key"),
        (own.private_bytes(
            form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()), "not a usable private key"),
        (own.public_key().public_bytes(
            form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo), "not a usable private key"),
        (b"", "not a usable private key"), (b"\xff\0", "not a usable private key"),
        (SigningKey.make().to_pem()[:40], "not a usable private key"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"^own.pem: is .*{text}.*keys make") as caught:
            SigningKey.from_pem(data, "own.pem")
        assert "\n" not in str(caught.value)


# ---- public keys -------------------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32), st.text(max_size=30))
def test_lines_are_read_as_they_were_written(raw: bytes, name: str) -> None:
    key = PublicKey(raw, clean_name(name))
    assert parse_public(key.line, "it") == key
    assert parse_public(f"  {key.line}\r\n", "it") == key
    assert len(key.line.splitlines()) == 1


@needs_program("ssh-keygen")
def test_keys_of_openssh(tmp_path: Path) -> None:
    def keygen(*words: object) -> str:
        return subprocess.run(["ssh-keygen", *map(str, words)], check=True, capture_output=True, text=True).stdout

    keygen("-q", "-t", "ed25519", "-N", "", "-C", "ada at work", "-f", tmp_path / "id")
    line = (tmp_path / "id.pub").read_text()
    key = parse_public(line, "id.pub")
    assert (key.name, key.line) == ("ada at work", line.strip())
    assert key.fingerprint in keygen("-l", "-f", tmp_path / "id.pub")
    mine = PublicKey(SigningKey.make().public, "mine")
    (tmp_path / "mine.pub").write_text(mine.line + "\n")
    assert mine.fingerprint in keygen("-l", "-f", tmp_path / "mine.pub")
    with pytest.raises(ConfigError, match="is a private key: give the public one"):
        parse_public((tmp_path / "id").read_text(), "id")
    keygen("-q", "-t", "ecdsa", "-N", "", "-f", tmp_path / "ec")
    with pytest.raises(ConfigError, match="is a key of kind ecdsa-sha2-nistp256; supported is ssh-ed25519"):
        parse_public((tmp_path / "ec.pub").read_text(), "ec.pub")


KEY = PublicKey(bytes(range(32)), "ada")
BLOB = base64.b64decode(KEY.line.split()[1])


def line_of(blob: bytes, kind: str = "ssh-ed25519") -> str:
    return f"{kind} {base64.b64encode(blob).decode()} ada"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "is not a public key"),
        ("ssh-ed25519", "is not a public key"),
        ("ssh-ed25519 *", "is not a public key"),
        ("ssh-ed25519 ää", "is not a public key"),
        ("hello world", "is not a public key"),
        (f'command="x" {KEY.line}', "is not a public key"),
        (line_of(BLOB[:-1]), "is not a public key"),
        (line_of(BLOB + b"\0"), "is not a public key"),
        (line_of(BLOB.replace(b"ed25519", b"ed25518")), "is not a public key"),
        (line_of(struct.pack(">I", 12) + BLOB[4:]), "is not a public key"),
        (line_of(BLOB[:15] + struct.pack(">I", 33) + BLOB[19:]), "is not a public key"),
        (line_of(BLOB, "ssh-rsa"), "is a key of kind ssh-rsa"),
        (line_of(BLOB, "sk-ssh-ed25519@openssh.com"), "is a key of kind sk-ssh"),
        ("-----BEGIN PRIVATE KEY-----", "is a private key"),
    ],
)
def test_what_is_no_key_is_refused(line: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^it: {text}"):
        parse_public(line, "it")


def test_files_of_several_keys() -> None:
    other = PublicKey(bytes(32), "")
    text = f"# team\n\n{KEY.line}\n  # more\n{other.line}\n"
    assert parse_publics(text, "it") == [KEY, other]
    assert parse_publics("# none\n", "it") == []
    with pytest.raises(ConfigError):
        parse_publics(text + "x\n", "it")


def test_names_are_harmless() -> None:
    assert clean_name(" a\n b\t\x1b[31mc\u202e ") == "a b [31mc"
    assert clean_name("x" * 999) == "x" * 200
    assert parse_public(KEY.line + "\x1b]0;x\x07", "it").name == "ada]0;x"


def test_cryptography_is_loaded_when_it_is_needed() -> None:
    code = (
        "import sys; from bootseer.trust import *; from bootseer.trust import Trust, PublicKey, parse, seal;"
        "PublicKey(bytes(32)).line; seal(b'', 'a', None); Trust();"
        "assert not [name for name in sys.modules if name.startswith(('cryptography', 'hdfs', 'urllib3'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())


def test_without_cryptography_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    for call in (SigningKey.make, lambda: SigningKey.from_pem(b"", "it"), lambda: verify(b"", b"", b"")):
        with pytest.raises(ConfigError, match=r"pip install 'bootseer\[image\]'"):
            call()
    assert ed25519.keyid_of(bytes(32)) == "66687aadf862bd776c8fc18b8e9f8e20089714856ee233b3902a591d0d5f2925"
