"""`bootseer keys ...`: make, show, trust, list and forget the keys that trees and environments are signed with.

In: a command line. Out: results on stdout (`--json` for scripts), errors on stderr, an exit status
(docs/errors.md). What the commands do is in bootseer.trust.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import socket
import sys
from typing import Annotated, Any

import typer

from bootseer.cli import running
from bootseer.counted import counted
from bootseer.errors import ConfigError, NotFound
from bootseer.trust import KeyFolder, PublicKey, TrustedKey
from bootseer.trust.key_folder import MOST_FILE_BYTES, SYSTEM_TRUSTED
from bootseer.trust.keys import clean_name, parse_publics

app = running.new_app("keys", "Keys: who may publish images and environments that this user runs.")

Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]


@app.command(epilog="bootseer keys make --name ci@example.com")
def make(
    name: Annotated[str, typer.Option(metavar="NAME", help="what others see of it (default USER@HOST)")] = "",
    as_json: Json = False,
) -> None:
    """Make this user's key. What is published from now on is signed with it; teammates trust its public part."""
    folder = KeyFolder.find()
    key = folder.make(name or f"{_user()}@{socket.gethostname()}")
    public = PublicKey(key.public, key.name)
    record = _own(folder, public)
    text = f"{public.line}\n{_where(folder)}\n{_way(public)}"
    _report(record, as_json, text)


@app.command(epilog="bootseer keys show > ada.pub")
def show(as_json: Json = False) -> None:
    """Show this user's public key: one line on stdout, where it lies on stderr."""
    folder = KeyFolder.find()
    public = folder.read_public()
    if public is None:
        raise NotFound(f"there is no key in {folder.path}: `bootseer keys make` makes one")
    _report(_own(folder, public), as_json, public.line)
    if not as_json:
        print(f"{_where(folder)}\n{_way(public)}", file=sys.stderr)


@app.command(epilog="bootseer keys trust ada.pub")
def trust(
    file: Annotated[str, typer.Argument(metavar="FILE", help="a public key (.pub), '-' for stdin")],
    name: Annotated[str, typer.Option(metavar="NAME", help="another name than the one in it")] = "",
    as_json: Json = False,
) -> None:
    """Trust a public key: what it signed is run as if this user had published it."""
    folder = KeyFolder.find()
    keys = _read(file)
    if name and len(keys) > 1:
        raise ConfigError(f"{file} holds {counted(len(keys), 'key')}: one name is not enough")
    if name:
        keys = [keys[0]._replace(name=clean_name(name))]
    added = [TrustedKey(key, folder.add(key)) for key in keys]
    lines = [
        f"trusted: {each.key.name or 'a key without a name'}, keyid {each.key.keyid}\n{each.path}"
        for each in added
    ]
    _report({"keys": [_record(each) for each in added]}, as_json, "\n".join(lines))


@app.command("list", epilog="bootseer keys list --json")
def list_(as_json: Json = False) -> None:
    """List the keys that are trusted, and the files that look like keys and are not used."""
    found = KeyFolder.find().read_trusted()
    lines = [f"{each.key.keyid[:16]}  {each.key.name or '-'}  {each.path}" for each in found.keys]
    lines += [f"not used: {reason}" for reason in found.ignored]
    if not lines:
        lines = ["no key is trusted: `bootseer keys make` makes one, `bootseer keys trust FILE.pub` adds others"]
    record = {"keys": [_record(each) for each in found.keys], "ignored": list(found.ignored)}
    _report(record, as_json, "\n".join(lines))


@app.command(epilog="bootseer keys forget ada@example.com")
def forget(
    which: Annotated[str, typer.Argument(metavar="KEY", help="name or first digits of the keyid")],
    as_json: Json = False,
) -> None:
    """Trust a key no longer."""
    gone = KeyFolder.find().forget(which)
    lines = [f"not trusted any more: {each.key.name or '-'}, keyid {each.key.keyid}" for each in gone]
    _report({"keys": [_record(each) for each in gone]}, as_json, "\n".join(lines))


def main(argv: list[str]) -> int:
    """Runs one command; returns the exit status."""
    return running.run(app, "bootseer keys", argv)


def _read(file: str) -> list[PublicKey]:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MOST_FILE_BYTES + 1)
        else:
            with open(file, "rb") as source:
                data = source.read(MOST_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is no public key") from error
    if len(data) > MOST_FILE_BYTES:
        raise ConfigError(f"{file}: is larger than {MOST_FILE_BYTES} bytes: that is no public key")
    keys = parse_publics(text, file)
    if not keys:
        raise ConfigError(f"{file}: holds no public key")
    return keys


def _own(folder: KeyFolder, public: PublicKey) -> dict[str, Any]:
    return _record(TrustedKey(public, folder.public_path)) | {"private_path": folder.private_path}


def _record(trusted: TrustedKey) -> dict[str, Any]:
    key = trusted.key
    return {
        "keyid": key.keyid,
        "name": key.name,
        "line": key.line,
        "fingerprint": key.fingerprint,
        "path": trusted.path,
    }


def _where(folder: KeyFolder) -> str:
    return (
        f"public key: {folder.public_path}\n"
        f"private key: {folder.private_path} (signs what you publish; jobs and teammates never need it)"
    )


def _way(public: PublicKey) -> str:
    return (
        f"teammates trust it by: echo {shlex.quote(public.line)} | bootseer keys trust -\n"
        f"root trusts it for all users of a node by putting that line into a file in {SYSTEM_TRUSTED}/"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _report(record: dict[str, Any], as_json: bool, text: str) -> None:
    sys.stdout.write((json.dumps(record) if as_json else text) + "\n")
