"""`bootseer keys ...`: make, show, trust, list and forget the keys that sign trees and environments.

In: a command line. Out: results on stdout (`--json` for scripts), errors on stderr, an exit status
(docs/reference/errors.md). The commands are implemented in bootseer.trust.
"""

from __future__ import annotations

import getpass
import os
import shlex
import socket
import sys
from typing import Annotated, Any

import typer

from bootseer.cli import running
from bootseer.cli.image_words import Json, print_result
from bootseer.counted import counted
from bootseer.errors import ConfigError, NotFound
from bootseer.trust import KeyDirectory, PublicKey, TrustedKey
from bootseer.trust.key_folder import MAX_FILE_BYTES, SYSTEM_TRUSTED
from bootseer.trust.keys import clean_name, parse_publics

app = running.new_app("keys", "Keys: the publishers whose images and environments this user trusts.")


@app.command(epilog="bootseer keys make --name ci@example.com")
def make(
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the key that other users see (default: USER@HOST)")
    ] = "",
    as_json: Json = False,
) -> None:
    """Make this user's key. It signs everything that this user publishes; teammates trust its public part."""
    directory = KeyDirectory.find()
    key = directory.make(name or f"{_user()}@{socket.gethostname()}")
    public = PublicKey(key.public, key.name)
    record = _own(directory, public)
    text = f"{public.line}\n{_locations(directory)}\n{_trust_commands(public)}"
    print_result(record, as_json, text)


@app.command(epilog="bootseer keys show > ada.pub")
def show(as_json: Json = False) -> None:
    """Show this user's public key: the key on stdout, its location on stderr."""
    directory = KeyDirectory.find()
    public = directory.read_public()
    if public is None:
        raise NotFound(f"there is no key in {directory.path}; make one with `bootseer keys make`")
    print_result(_own(directory, public), as_json, public.line)
    if not as_json:
        print(f"{_locations(directory)}\n{_trust_commands(public)}", file=sys.stderr)


@app.command(epilog="bootseer keys trust ada.pub")
def trust(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Public key file (.pub), '-' for stdin")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name to use instead of the one in the file")] = "",
    as_json: Json = False,
) -> None:
    """Trust a public key: treat everything that it signs as if this user had published it."""
    directory = KeyDirectory.find()
    keys = _read(file)
    if name and len(keys) > 1:
        raise ConfigError(f"{file} holds {counted(len(keys), 'key')}: one name is not enough")
    if name:
        keys = [keys[0]._replace(name=clean_name(name))]
    added = [TrustedKey(key, directory.add(key)) for key in keys]
    lines = [
        f"trusted: {each.key.name or 'a key without a name'}, keyid {each.key.keyid}\n{each.path}"
        for each in added
    ]
    print_result({"keys": [_record(each) for each in added]}, as_json, "\n".join(lines))


@app.command("list", epilog="bootseer keys list --json")
def list_(as_json: Json = False) -> None:
    """List the trusted keys, and the key files that are not used."""
    found = KeyDirectory.find().read_trusted()
    lines = [f"{each.key.keyid[:16]}  {each.key.name or '-'}  {each.path}" for each in found.keys]
    lines += [f"not used: {reason}" for reason in found.ignored]
    if not lines:
        lines = ["no key is trusted; make one (`bootseer keys make`), or add one (`bootseer keys trust FILE.pub`)"]
    record = {"keys": [_record(each) for each in found.keys], "ignored": list(found.ignored)}
    print_result(record, as_json, "\n".join(lines))


@app.command(epilog="bootseer keys forget ada@example.com")
def forget(
    which: Annotated[str, typer.Argument(metavar="KEY", help="Name, or first digits of the key ID")],
    as_json: Json = False,
) -> None:
    """Stop trusting a key."""
    gone = KeyDirectory.find().forget(which)
    lines = [f"no longer trusted: {each.key.name or '-'}, keyid {each.key.keyid}" for each in gone]
    print_result({"keys": [_record(each) for each in gone]}, as_json, "\n".join(lines))


def main(argv: list[str]) -> int:
    """Run one command and return the exit status."""
    return running.run(app, "bootseer keys", argv)


def _read(file: str) -> list[PublicKey]:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with open(file, "rb") as source:
                data = source.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not a public key") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file}: is larger than {MAX_FILE_BYTES} bytes: it is not a public key")
    keys = parse_publics(text, file)
    if not keys:
        raise ConfigError(f"{file}: holds no public key")
    return keys


def _own(directory: KeyDirectory, public: PublicKey) -> dict[str, Any]:
    return _record(TrustedKey(public, directory.public_path)) | {"private_path": directory.private_path}


def _record(trusted: TrustedKey) -> dict[str, Any]:
    key = trusted.key
    return {
        "keyid": key.keyid,
        "name": key.name,
        "line": key.line,
        "fingerprint": key.fingerprint,
        "path": trusted.path,
    }


def _locations(directory: KeyDirectory) -> str:
    return (
        f"public key: {directory.public_path}\n"
        f"private key: {directory.private_path} (signs what you publish; jobs and teammates never need it)"
    )


def _trust_commands(public: PublicKey) -> str:
    return (
        f"teammates trust it with: echo {shlex.quote(public.line)} | bootseer keys trust -\n"
        f"root trusts it for all users of a node: write that line to a file in {SYSTEM_TRUSTED}/"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
