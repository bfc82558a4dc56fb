"""PURE: removal of secrets from commands, where only the program's syntax identifies them.

`wandb login X`, `sshpass -p X`, `echo X | docker login --password-stdin`: no name of a variable or option marks X.
Known programs are in tables. For others, a word after one with a name of secrets (`token X`) is hidden. Commands
that name packages are excepted, as versions must stay distinct. The rest can only be guessed (`looks_secret`).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from bootseer.env.parse.redaction import SECRET, is_secret_name, redact_text

MAX_DEPTH = 4  # nesting of quoted commands

_PIECES = re.compile(
    r"(?P<stop>&&|\|\||\|&?|[;\n()]|(?<![<>])&(?!>))|(?P<into>\d?(?:<<<|<<-?|>>|>\||>|<)(?:&\d)?)"
    r"|(?P<word>(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\\.|[^\s\"'\\;&|<>()]|[\"'\\])+)",
    re.DOTALL,
)
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_VARIABLES = re.compile(r"(?:\$\{?\w+\}?)+")
# Program, its subcommand words, and the index of the first secret among the following words that are not options.
# All words from that one on are secrets.
_POSITIONAL: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("wandb", ("login",), 0),
    ("vault", ("login",), 0),
    ("snyk", ("auth",), 0),
    ("ngrok", ("authtoken",), 0),
    ("ngrok", ("config", "add-authtoken"), 0),
    ("anaconda", ("auth",), 0),
    ("conda", ("token", "set"), 0),
    ("gcloud", ("auth", "activate-refresh-token"), 1),
    ("poetry", ("config", "http-basic."), 0),
    ("mc", ("alias", "set"), 2),
    ("mc", ("config", "host", "add"), 2),
    ("htpasswd", (), 2),
    ("chpasswd", (), 0),
)
_CONTAINERS = ("docker", "podman", "nerdctl", "buildah", "skopeo", "helm", "oras", "crane", "regctl", "apptainer")
_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*_CONTAINERS, "az", "twine", "sshpass", "ossutil"), ("-p",)),
    **dict.fromkeys(("mysql", "mysqldump", "mysqladmin", "mysqlimport", "mariadb", "mariadb-dump", "7z"), ("-p",)),
    **dict.fromkeys(("zip", "unzip", "sqlcmd", "bcp"), ("-P",)),
    **dict.fromkeys(("anaconda", "glab", "doctl"), ("-t",)),
    **dict.fromkeys(("redis-cli",), ("-a",)),
    **dict.fromkeys(("ldapsearch", "ldapadd"), ("-w",)),
    **dict.fromkeys(("openssl",), ("-k", "-K", "-pass", "-passin", "-passout")),
    **dict.fromkeys(("lftp", "smbclient", "ftp"), ("-u", "-U")),
    **dict.fromkeys(("curl",), ("-u", "-U")),
}
# `-p` of these is a secret only after that word; "-p X" of mysql is a database, "-pX" a password.
_ONLY_AFTER = {**dict.fromkeys((*_CONTAINERS, "az"), "login"), "twine": "upload"}
_ONLY_ATTACHED = {"mysql", "mysqldump", "mysqladmin", "mysqlimport", "mariadb", "mariadb-dump", "7z"}
_ONLY_COLON = {"curl"}  # without a colon it is only a user
_WRITERS = {"echo", "printf"}
_READERS = {"chpasswd", "passwd", "gpg", "openssl", "sudo", "cryptsetup"}
_SECRET_FILES = {
    *(".netrc", "_netrc", ".pypirc", ".pgpass", ".my.cnf", ".npmrc", "credentials", ".git-credentials"),
    *("auth.json", "kaggle.json", "id_rsa", "id_ed25519", "id_ecdsa", ".condarc", "pip.conf", "uv.toml", ".env"),
    ".htpasswd",
}
# Their words are packages, files and directories.
_PLAIN = {
    *("uv", "pip", "pip3", "conda", "mamba", "micromamba", "pdm", "pixi", "apt", "apt-get", "yum", "dnf", "apk"),
    *("cp", "mv", "ln", "ls", "rm", "cat", "mkdir", "rmdir", "touch", "chmod", "chown", "cd", "source", "install"),
    *("test", "[", "git", "tar", "grep", "sed", "awk", "find", "which", "type", "unset", "make", "cmake"),
}
_INSTALLING = {"install", "add", "sync", "download", "wheel", "remove", "uninstall", "update", "upgrade", "create"}
_SETTING = {"config", "configure", "set", "login"}
_VERBS = {
    *("login", "logout", "set", "get", "list", "ls", "create", "add", "remove", "rm", "delete", "status", "show"),
    *("init", "refresh", "revoke", "activate", "configure", "config", "setup", "print", "generate", "import"),
}
_SUBCOMMAND = re.compile(r"[a-z]+(-[a-z]+)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_DOTTED = re.compile(r"[A-Za-z0-9_./:@][A-Za-z0-9_./:@-]*")


class _Word(NamedTuple):
    start: int
    end: int
    text: str  # as written
    bare: str  # without quotes


class _Command(NamedTuple):
    words: list[_Word]
    written: list[_Word]  # files that receive its output
    given: list[_Word]  # words that are its input (`<<<`)
    is_piped: bool  # into the next command


def redact_command(command: str, values: Iterable[str] = ()) -> str:
    """Redact a line for /bin/sh. Args: values: secrets to hide everywhere."""
    # Words come first: redaction by shape inserts brackets, which the shell parser cannot read.
    return redact_text(_hide_words(command, 0), values)


def _hide_words(text: str, depth: int) -> str:
    commands = list(_parse(text))
    places: list[tuple[int, int, str]] = []
    for number, command in enumerate(commands):
        after = commands[number + 1] if command.is_piped and number + 1 < len(commands) else None
        hidden = {word for word in _secrets(command, after) if _can_be_secret(word.bare)}
        places += [(word.start, word.end, _hidden(word)) for word in hidden]
        for word in command.words:
            if word not in hidden and word.text[0] in "\"'" and " " in word.bare and depth < MAX_DEPTH:
                inner = _hide_words(word.text[1:-1], depth + 1)
                places.append((word.start, word.end, word.text[0] + inner + word.text[-1]))
    for start, end, instead in sorted(places, reverse=True):
        text = text[:start] + instead + text[end:]
    return text


def _hidden(word: _Word) -> str:
    """Redact a word; of an option with an attached value, only the value."""
    found = re.match(r"-[A-Za-z]", word.text)
    return f"{found[0]}{SECRET}" if found and not word.text.startswith("--") else SECRET


def _can_be_secret(text: str) -> bool:
    value = text[2:] if re.match(r"-[A-Za-z].", text) else text
    is_text = value not in ("", "-", SECRET) and "://" not in value
    return is_text and _VARIABLES.fullmatch(value) is None


def _parse(text: str) -> Iterator[_Command]:
    command = _Command([], [], [], False)
    into = ""
    for piece in _PIECES.finditer(text):
        if piece["stop"]:
            yield command._replace(is_piped=piece[0] in ("|", "|&"))
            command, into = _Command([], [], [], False), ""
        elif piece["into"]:
            into = "" if "&" in piece[0] else piece[0].lstrip("0123456789")
        else:
            word = _Word(piece.start(), piece.end(), piece[0], _bare(piece[0]))
            place = {"": command.words, "<<<": command.given}.get(into, command.written if ">" in into else None)
            if place is not None:
                place.append(word)
            into = ""
    yield command


def _bare(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text.replace('"', "").replace("'", ""), flags=re.DOTALL)


def _secrets(command: _Command, after: _Command | None) -> Iterator[_Word]:
    """Yield words that may be secrets; a word can appear more than once."""
    words = command.words
    while words and _ASSIGNED.fullmatch(words[0].bare):
        words = words[1:]
    if not words:
        return
    names = [posixpath.basename(word.bare) for word in words]
    if _takes_secret(command):
        yield from command.given
    if names[0] in _WRITERS and (
        any(map(_is_secret_file, command.written)) or (after is not None and _takes_secret(after))
    ):
        yield from (word for word in words[1:] if not re.fullmatch(r"-[neE]+", word.bare))
    for place, name in enumerate(names):
        yield from _of_program(name, words[place + 1 :], names[place + 1 :])
    yield from _after_names(words, names)


def _of_program(name: str, words: list[_Word], names: list[str]) -> Iterator[_Word]:
    """Yield secrets of a program; `name` may follow a wrapper (`sudo docker login`), so wrappers need no table."""
    for program, begins, first in _POSITIONAL:
        if program == name:
            others = [word for word in words if not word.bare.startswith("-")]
            starts = [word.bare.startswith(begin) for word, begin in zip(others, begins, strict=False)]
            if len(starts) == len(begins) and all(starts):
                yield from others[len(begins) + first :]
    options = _OPTIONS.get(name, ())
    if not options or (name in _ONLY_AFTER and _ONLY_AFTER[name] not in names):
        return
    for place, word in enumerate(words):
        for option in options:
            if word.bare == option and name not in _ONLY_ATTACHED and place + 1 < len(words):
                if name not in _ONLY_COLON or ":" in words[place + 1].bare:
                    yield words[place + 1]
            elif word.bare.startswith(option) and len(option) == 2 < len(word.bare) and name not in _ONLY_COLON:
                yield word


def _after_names(words: list[_Word], names: list[str]) -> Iterator[_Word]:
    """Yield words after names of secrets: `aws configure set aws_secret_access_key X`, `tool token X`."""
    is_setting = any(name in _SETTING for name in names[:4])
    if not is_setting and (names[0] in _PLAIN or any(name in _INSTALLING for name in names[:4])):
        return
    for place, (word, following) in enumerate(pairwise(words)):
        # Programs and their subcommands can have such names, too.
        if place == 0 or not (_DOTTED if is_setting else _NAME).fullmatch(word.bare):
            continue
        if not is_secret_name(word.bare.replace(".", "_")) or following.bare.startswith("-"):
            continue
        is_verb = following.bare in _VERBS or (
            word.bare.lower() == "auth" and _SUBCOMMAND.fullmatch(following.bare) is not None
        )
        if not is_verb:
            yield following


def _takes_secret(command: _Command) -> bool:
    """Return whether it reads a secret, or writes its input to a file for secrets."""
    names = [posixpath.basename(word.bare) for word in command.words]
    reads = any(name.endswith("-stdin") or name in ("--with-token", "login") for name in names)
    keeps = (names[:1] == ["tee"] and any(map(_is_secret_file, command.words[1:]))) or any(
        map(_is_secret_file, command.written)
    )
    return reads or keeps or any(name in _READERS for name in names[:2])


def _is_secret_file(word: _Word) -> bool:
    name = posixpath.basename(word.bare)
    return name in _SECRET_FILES or is_secret_name(name.replace(".", "_"))
