"""PURE: removal of secrets from commands, URLs and values of variables that are stored or shown.

Every secret becomes the same constant, "(secret)". A keyed hash would distinguish secrets, but its key would be
public, because each node computes the document. A weak password could be guessed from it. So two runs that differ
only in a secret have the same key. Hidden are: user and password of URLs; values in their queries and fragments
with names of secrets or signatures, or that seem random; values of variables and options with names of secrets;
authorization headers; tokens of well-known shapes. Values of variables that hold a secret are hidden everywhere.
For secrets that only a program can identify in its command, see redaction_commands.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

SECRET = "(secret)"  # noqa: S105
MIN_VALUE = 6  # letters; shorter values of variables are not searched in other text, as they may be any word

_SECRET_NAME = re.compile(
    r"TOKEN(?!I[SZ])|PASSW|PASSPHRASE|SECRET|CREDENTIAL|KEY(?!RING|BOARD|WORD)"
    r"|(?<![A-Z])(?:AUTH|PASS|PAT|PWD|NETRC|COOKIE|SIG|SIGNATURE)(?![A-Z])"
)
_NO_SECRETS = {"PWD", "OLDPWD"}
_URL = re.compile(r"\b([A-Za-z][A-Za-z0-9+.\-]*)://[^\s\"'<>`]+")
_USER = re.compile(r"://[^/]*@")
# The same for a password that contains a slash: up to the last @.
_ODD_USER = re.compile(r"://.*@(?=[\w\[$.-])")
_PARAMETER = re.compile(r"([?&#;])([A-Za-z0-9_.\-]+)=([^&#;]+)")
# Parameters that select what is fetched: other values must give other keys.
_SPEAKING = {
    *("version", "ref", "rev", "revision", "at", "branch", "tag", "commit", "path", "file", "filename", "name"),
    *("format", "raw", "dl", "download", "api-version", "egg", "subdirectory"),
    *("sha1", "sha224", "sha256", "sha384", "sha512", "md5", "blake2b"),
}
# Parameters of signed URLs, which change for the same file.
_SIGNED = re.compile(
    r"x-(amz|goog|oss|ms|cos|obs)-.*|expires?|policy|key-pair-id|googleaccessid|awsaccesskeyid|ossaccesskeyid"
    r"|s[eptvr]|spr|sdd|sip|sks|skt|ske|skv|skoid|sktid|code|nonce|timestamp|hmac|jwt|ticket|otp|session.*",
    re.IGNORECASE,
)
_LETTERS = re.compile(r"[A-Za-z0-9_+/=-]{20,}")
_WORD = r"(?:\"[^\"]*\"|'[^']*'|\\.|[^\s\"'\\;&|])+"
_ASSIGNED = re.compile(rf"(?<![\w$-])([A-Za-z_][A-Za-z0-9_]*)=(?!=)({_WORD})")
_OPTION = re.compile(rf"(?<![\w-])(--?[A-Za-z][A-Za-z0-9_-]*)(=|\s+)({_WORD})")
_USER_OPTION = re.compile(rf"(?<![\w-])(-u|--user|--proxy-user)(=|\s+)?({_WORD})")
_HEADER = re.compile(
    r"((?:Proxy-)?Authorization|X-[A-Za-z-]*(?:Token|Key|Auth)|Private-Token|Cookie)\s*:\s*[^\"'\n]+",
    re.IGNORECASE,
)
_NETRC = re.compile(r"(\bpassword\s+)([^\s\"'\\]+)")
_SHAPES = re.compile(
    r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|pypi-[\w-]{32,}"
    r"|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{12,}|sk-[\w-]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)
_VARIABLE = re.compile(r"\"?\$\{?\w+\}?\"?")
_USER_TEXT = re.compile(r"://([^\s/@\"'<>`]*)@")
_EXPANSION = re.compile(r"\$\{?([A-Za-z_]\w*)")
_VERSION = re.compile(r"[\"']?\d+(\.[\w*+]+)*(=[\w.*]+)?[\"']?")


def is_secret_name(name: str) -> bool:
    """Return whether a variable or option of this name holds a secret."""
    plain = name.upper().replace("-", "_").strip("_")
    return plain not in _NO_SECRETS and _SECRET_NAME.search(plain) is not None


def secret_values(environ: Mapping[str, str], names: Iterable[str] = ()) -> list[str]:
    """Return values of variables that hold secrets, the longest first. Args: names: of further such variables."""
    further = set(names)
    found = {
        value
        for name, value in environ.items()
        if len(value) >= MIN_VALUE and (name in further or is_secret_name(name))
    }
    return sorted(found, key=lambda value: (-len(value), value))


def user_variables(text: str) -> list[str]:
    """Return names of variables that are user or password in a URL: `https://$NAME:${WORD}@host`."""
    found = (name for user in _USER_TEXT.findall(text) for name in _EXPANSION.findall(user))
    return list(dict.fromkeys(found))


def redact_text(text: str, values: Iterable[str] = ()) -> str:
    """Redact a command or other text. Args: values: secrets to hide everywhere (`secret_values`)."""
    for value in values:
        text = text.replace(value, SECRET)
    text = _SHAPES.sub(SECRET, text)
    text = redact_urls(text)
    text = _HEADER.sub(lambda found: f"{found[1]}: {SECRET}", text)
    text = _NETRC.sub(lambda found: found[1] + SECRET, text)
    text = _USER_OPTION.sub(_hide_user, text)
    text = _OPTION.sub(_hide_option, text)
    return _ASSIGNED.sub(_hide_assigned, text)


def redact_variable(name: str, value: str, values: Iterable[str] = ()) -> str:
    return SECRET if value and is_secret_name(name) else redact_text(value, values)


def redact_urls(text: str) -> str:
    """Redact user, password and secret parameters of every URL in a text."""
    return _URL.sub(lambda found: _redact_url(found[0]), text)


def _redact_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    server = rest.partition("/")[0]
    # An @ after the first slash marks a revision (git+https://host/repository@v1), unless an earlier colon begins
    # a password with a slash.
    if "@" in server:
        url = _USER.sub(f"://{SECRET}@", url, count=1)
    elif ":" in server and "@" in rest and not _has_port(server):
        url = _ODD_USER.sub(f"://{SECRET}@", url, count=1)
    return url if scheme.lower() == "file" else _PARAMETER.sub(_hide_parameter, url)


def _has_port(server: str) -> bool:
    port = server.partition(":")[2]
    return server.startswith("[") or port.isdigit() or port.startswith("$")


def _hide_parameter(found: re.Match[str]) -> str:
    name, value = found[2], found[3]
    is_open = name.lower() in _SPEAKING or not (
        is_secret_name(name) or _SIGNED.fullmatch(name) or looks_secret(value)
    )
    return found[0] if is_open else f"{found[1]}{name}={SECRET}"


def looks_secret(text: str) -> bool:
    """Return whether a word seems random: long, with letters of both cases and digits, not a path."""
    return any(_is_odd(piece) for piece in _LETTERS.findall(text))


def _is_odd(text: str) -> bool:
    kinds = (str.isupper, str.islower, str.isdigit)
    changes = sum(before.isalpha() != after.isalpha() for before, after in pairwise(text))
    return "/" not in text and all(any(map(kind, text)) for kind in kinds) and changes >= 4


def _hide_user(found: re.Match[str]) -> str:
    """Hide curl's `-u name:password`; -u of other programs has another meaning, and no colon."""
    user = found[3].strip("\"'")
    return found[0] if ":" not in user or "://" in user else f"{found[1]}{found[2] or ' '}{SECRET}"


def _hide_option(found: re.Match[str]) -> str:
    name, mark, value = found[1], found[2], found[3]
    if mark != "=" and name.endswith(("-stdin", "-with-token")):
        return found[0]  # the option names the source of the secret
    if not is_secret_name(name.lstrip("-")) or _VARIABLE.fullmatch(value) or (mark != "=" and value[0] == "-"):
        return found[0]
    return f"{name}{mark}{SECRET}"


def _hide_assigned(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    # `$NAME` is redacted by its own name. `some_key=1.2` is a package of conda, and versions must stay distinct.
    is_package = name.islower() and _VERSION.fullmatch(value) is not None
    if not is_secret_name(name) or is_package or _VARIABLE.fullmatch(value):
        return found[0]
    return f"{name}={SECRET}"
