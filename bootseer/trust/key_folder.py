"""The directory of keys: `$BOOTSEER_KEYS`, else `~/.config/bootseer/keys/`; and root's trusted keys for all users.

    own.pem        the private key, which signs what this user publishes; no job needs it
    own.pub        its public key
    trusted/*.pub  public keys of others; /etc/bootseer/trusted/*.pub are root's

A file that another user could have written does not count as a key; `TrustedKeys.ignored` has the reason.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from bootseer.errors import ConfigError, NotFound
from bootseer.trust.ed25519 import SigningKey
from bootseer.trust.keys import PublicKey, TrustedKey, clean_name, parse_public, parse_publics
from bootseer.trust.owned_files import NotOwnedError, check_owned_directory, own_uids, read_owned

VARIABLE = "BOOTSEER_KEYS"
SYSTEM_TRUSTED = "/etc/bootseer/trusted"
PRIVATE, PUBLIC, TRUSTED = "own.pem", "own.pub", "trusted"
MAX_FILE_BYTES = 64 << 10
MAX_FILES = 1024  # of one directory
MIN_KEYID = 4  # characters of a keyid that are enough to name a key


class TrustedKeys(NamedTuple):
    keys: tuple[TrustedKey, ...]
    ignored: tuple[str, ...]  # why files that resemble keys are ignored


class KeyDirectory:
    """The keys of this user. They are read on demand."""

    def __init__(self, path: str, *, system_trusted: str = SYSTEM_TRUSTED) -> None:
        self.path = os.path.abspath(path)
        self._system_trusted = system_trusted

    @classmethod
    def find(cls, environ: Mapping[str, str] | None = None) -> KeyDirectory:
        environ = os.environ if environ is None else environ
        if path := environ.get(VARIABLE):
            return cls(path)
        config = environ.get("XDG_CONFIG_HOME", "")
        if not config.startswith("/"):
            home = environ.get("HOME", "")
            config = os.path.join(home if home.startswith("/") else os.path.expanduser("~"), ".config")
        return cls(os.path.join(config, "bootseer", "keys"))

    @property
    def private_path(self) -> str:
        return os.path.join(self.path, PRIVATE)

    @property
    def public_path(self) -> str:
        return os.path.join(self.path, PUBLIC)

    @property
    def trusted_path(self) -> str:
        return os.path.join(self.path, TRUSTED)

    # ---- the user's own key --------------------------------------------------------------------------------

    def make(self, name: str) -> SigningKey:
        """Make a new key of this user, with `name` for people.

        Raises: ConfigError when there is one already, or if others could change it.
        """
        for path in (self.private_path, self.public_path):
            if os.path.lexists(path):
                raise ConfigError(
                    f"{path} already exists: `bootseer keys show` shows it; for a new one move it away first"
                )
        self._make_directory(self.path)
        key = SigningKey.make(name=clean_name(name))
        _write_new(self.private_path, key.to_pem(), 0o600)
        _write_new(self.public_path, PublicKey(key.public, key.name).line.encode() + b"\n", 0o644)
        return key

    def read_private(self) -> SigningKey | None:
        """Return the key that signs; None if there is none.

        Raises: ConfigError for a key that others can read or replace, and for an invalid one.
        """
        try:
            data, _ = read_owned(self.private_path, max_bytes=MAX_FILE_BYTES, is_secret=True)
        except FileNotFoundError:
            return None
        except NotOwnedError as error:
            raise ConfigError(f"the private key is not used: {error}") from error
        key = SigningKey.from_pem(data, self.private_path)
        try:
            public = self._read_public()
        except (ConfigError, NotOwnedError):
            return key
        if public is not None and public.raw == key.public:
            key.name = public.name
        return key

    def read_public(self) -> PublicKey | None:
        """Return the public key of this user; None if there is none.

        Raises: ConfigError for an invalid key, or one that another user could have written.
        """
        try:
            public = self._read_public()
        except NotOwnedError as error:
            raise ConfigError(f"the public key is not used: {error}") from error
        if public is not None:
            return public
        key = self.read_private()
        return None if key is None else PublicKey(key.public)

    def _read_public(self) -> PublicKey | None:
        try:
            data, _ = read_owned(self.public_path, max_bytes=MAX_FILE_BYTES)
        except FileNotFoundError:
            return None
        return parse_public(_text(data, self.public_path), self.public_path)

    # ---- keys of others ------------------------------------------------------------------------------------

    def read_trusted(self) -> TrustedKeys:
        """Read the own key, those in `trusted/`, and root's. A faulty file gives a reason, not an error."""
        keys: list[TrustedKey] = []
        ignored: list[str] = []
        try:
            public = self.read_public()
            if public is not None:
                keys.append(TrustedKey(public, self.public_path))
        except ConfigError as error:
            ignored.append(str(error))
        for directory, uids in ((self.trusted_path, own_uids()), (self._system_trusted, frozenset((0,)))):
            for path in _list_keys(directory, ignored):
                try:
                    data, _ = read_owned(path, max_bytes=MAX_FILE_BYTES, uids=uids)
                    found = parse_publics(_text(data, path), path)
                    keys += [TrustedKey(key, path) for key in found]
                except FileNotFoundError:
                    continue  # removed at this moment, or a dangling link
                except (NotOwnedError, ConfigError) as error:
                    ignored.append(str(error))
        return TrustedKeys(tuple(keys), tuple(ignored))

    def add(self, key: PublicKey) -> str:
        """Trust a key; return the path of its file."""
        for known in self.read_trusted().keys:
            if known.key.raw == key.raw:
                return known.path
        self._make_directory(self.trusted_path)
        slug = re.sub(r"[^A-Za-z0-9._@-]+", "-", key.name)[:64].strip("-.") or "key"
        path = os.path.join(self.trusted_path, f"{slug}-{key.keyid[:8]}.pub")
        if os.path.lexists(path):
            raise ConfigError(f"{path} already exists and is not used: `bootseer keys list` shows why")
        _write_new(path, key.line.encode() + b"\n", 0o644)
        return path

    def forget(self, which: str) -> list[TrustedKey]:
        """Remove the trust in a key, by its name or the beginning of its keyid; return the removed entries.

        Raises: NotFound; ConfigError when several keys match, and for keys that are not in `trusted/`.
        """
        meant = [each for each in self.read_trusted().keys if _is_meant(each.key, which)]
        if not meant:
            raise NotFound(f"no trusted key is named {which!r}: `bootseer keys list` lists them")
        if len({each.key.raw for each in meant}) > 1:
            ids = ", ".join(sorted({each.key.keyid[:16] for each in meant}))
            raise ConfigError(f"{which!r} means several keys: name one by its keyid: {ids}")
        for each in meant:
            if os.path.dirname(each.path) != self.trusted_path:
                raise ConfigError(f"{each.path} is not in {self.trusted_path}: its owner has to remove it")
        for each in meant:
            _remove_from_file(each)
        return meant

    def _make_directory(self, path: str) -> None:
        """Make a directory and its missing parents, all for this user alone."""
        missing = []
        above = path
        while not os.path.isdir(above):
            missing.append(above)
            above = os.path.dirname(above)
        try:
            for directory in reversed(missing):
                os.mkdir(directory, 0o700)
            check_owned_directory(path)
        except FileExistsError as error:
            raise ConfigError(f"{error.filename} is a file, but a directory for keys is needed there") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be made: {error.strerror}: set {VARIABLE} to a directory") from error
        except NotOwnedError as error:
            raise ConfigError(f"keys in {path} would not be trusted: {error}") from error


def _list_keys(directory: str, ignored: list[str]) -> list[str]:
    try:
        names = sorted(
            name for name in os.listdir(directory) if name.endswith(".pub") and not name.startswith(".")
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        ignored.append(f"{directory} cannot be listed: {error.strerror}")
        return []
    if len(names) > MAX_FILES:
        ignored.append(f"{directory} has {len(names)} keys; only the first {MAX_FILES} are read")
    return [os.path.join(directory, name) for name in names[:MAX_FILES]]


def _is_meant(key: PublicKey, which: str) -> bool:
    is_start = len(which) >= MIN_KEYID and key.keyid.startswith(which.lower())
    return is_start or (which != "" and which in (key.name, key.line, key.fingerprint))


def _remove_from_file(trusted: TrustedKey) -> None:
    """Remove a key from its file, which may contain others; those stay."""
    try:
        with open(trusted.path, encoding="utf-8") as file:
            lines = file.read().splitlines()
        kept = [line for line in lines if not _holds(line, trusted.key)]
        if any(line.strip() and not line.lstrip().startswith("#") for line in kept):
            _replace(trusted.path, ("\n".join(kept) + "\n").encode())
        else:
            os.unlink(trusted.path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{trusted.path} cannot be removed: {error.strerror}") from error


def _holds(line: str, key: PublicKey) -> bool:
    try:
        return parse_public(line, "").raw == key.raw
    except ConfigError:
        return False


def _write_new(path: str, data: bytes, mode: int) -> None:
    """Write a new file atomically, and never replace one."""
    _with_aside(path, data, mode, lambda aside: os.link(aside, path, follow_symlinks=False))


def _replace(path: str, data: bytes) -> None:
    _with_aside(path, data, 0o644, lambda aside: os.rename(aside, path))


def _with_aside(path: str, data: bytes, mode: int, publish: Callable[[str], None]) -> None:
    aside = f"{path}.{secrets.token_hex(4)}.new"
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            with open(fd, "wb") as file:
                os.fchmod(file.fileno(), mode)  # regardless of the umask
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            publish(aside)
        finally:
            with suppress(OSError):  # a rename has moved it; after a link the key has its name
                os.unlink(aside)
    except FileExistsError as error:
        raise ConfigError(f"{path} already exists") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a public key") from error
