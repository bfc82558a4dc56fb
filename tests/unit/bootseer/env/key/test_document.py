"""The key document: one canonical form, what is refused, differences entry by entry, and no secret in it."""

from __future__ import annotations

import hashlib
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.env.key.document import (
    MAX_DOCUMENT_BYTES,
    MAX_READS,
    Change,
    KeyDocument,
    decode,
    differences,
    encode,
    key_of,
    summarize_reads,
    to_utf8_text,
)
from bootseer.env.parse.redaction import (
    MIN_VALUE,
    SECRET,
    is_secret_name,
    redact_text,
    redact_variable,
    secret_values,
    user_variables,
)
from bootseer.errors import ConfigError, FormatVersion, IntegrityError

DOCUMENT = KeyDocument(
    commands=["pip install -r requirements.txt", "pip install ."],
    targets=["/opt/venv"],
    inputs={"requirements.txt": "3f" * 32},
    base={"kind": "python", "dist:numpy": "1.0 " + "aa" * 32},
    variables={"CC": "gcc-12"},
    salt="",
)
OLD = (
    b'{"base":{"dist:numpy":"1.0 ' + b"aa" * 32 + b'","kind":"python"},'
    b'"commands":["pip install -r requirements.txt","pip install ."],"cwd":"",'
    b'"format":"bootseer-env-key/1","inputs":{"requirements.txt":"' + b"3f" * 32 + b'"},'
    b'"salt":"","targets":["/opt/venv"],"variables":{"CC":"gcc-12"}}'
)

names = st.text(min_size=1, max_size=8)
tables = st.dictionaries(names, names, max_size=4)
documents = st.builds(
    KeyDocument,
    commands=st.lists(names, max_size=4),
    targets=st.lists(names, max_size=3),
    inputs=tables,
    base=tables,
    variables=tables,
    salt=names,
    cwd=names,
    reads=tables,
    seen=names,
    guess=names,
)


def test_canonical_form_never_changes() -> None:
    """Keys of stores that exist would no longer be found."""
    document = msgspec.structs.replace(
        DOCUMENT, reads={"conf (names in it)": "1 " + "0a" * 32}, seen="observed", guess="bb" * 32
    )
    assert encode(document) == (
        b'{"base":{"dist:numpy":"1.0 ' + b"aa" * 32 + b'","kind":"python"},'
        b'"commands":["pip install -r requirements.txt","pip install ."],"cwd":"",'
        b'"format":"bootseer-env-key/2","guess":"' + b"bb" * 32 + b'",'
        b'"inputs":{"requirements.txt":"'
        + b"3f" * 32
        + b'"},"reads":{"conf (names in it)":"1 '
        + b"0a" * 32
        + b'"},'
        b'"salt":"","seen":"observed","targets":["/opt/venv"],"variables":{"CC":"gcc-12"}}'
    )
    assert key_of(DOCUMENT) == hashlib.sha256(encode(DOCUMENT)).hexdigest()


def test_documents_of_the_first_format_stay_readable() -> None:
    """Of stores that exist: for `explain`, and for whoever restores by key."""
    assert decode(OLD, "here") == msgspec.structs.replace(DOCUMENT, format="bootseer-env-key/1")


def test_so_many_reads_that_a_document_cannot_have_them_are_put_together() -> None:
    reads = {f"a/{number % 7}/{number}/file": "3f" * 32 for number in range(3 * MAX_READS)}
    made = summarize_reads(reads)
    assert len(made) <= MAX_READS
    assert summarize_reads(reads | {"a/3/3/file": "9c" * 32}) != made
    assert summarize_reads(dict(list(reads.items())[:-1])) != made
    assert summarize_reads({"a": "b"}) == {"a": "b"}


@given(documents)
def test_what_is_written_is_read_again(document: KeyDocument) -> None:
    data = encode(document)
    assert decode(data, "here") == document
    assert data == json.dumps(
        json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode() or any(ord(letter) < 32 or ord(letter) == 127 for letter in data.decode())


@given(documents, documents)
def test_keys_are_equal_if_and_only_if_there_is_no_difference(one: KeyDocument, other: KeyDocument) -> None:
    assert (key_of(one) == key_of(other)) == (differences(one, other) == [])
    assert differences(one, one) == []


@given(documents, documents)
def test_differences_backwards_are_the_same_fields(one: KeyDocument, other: KeyDocument) -> None:
    there, back = differences(one, other), differences(other, one)
    lists = ("commands:", "targets:")  # of these there is more than one shortest way
    told = [[change for change in each if not change.field.startswith(lists)] for each in (there, back)]
    assert told[0] == [Change(field, now, was) for field, was, now in told[1]]
    assert (there == []) == (back == [])


def test_differences_name_the_entry() -> None:
    other = msgspec.structs.replace(
        DOCUMENT,
        inputs={"requirements.txt": "9c" * 32, "new.txt": "00" * 32},
        base={"kind": "python"},
        salt="2",
    )
    assert differences(DOCUMENT, other) == [
        Change("inputs:new.txt", None, "00" * 32),
        Change("inputs:requirements.txt", "3f" * 32, "9c" * 32),
        Change("base:dist:numpy", "1.0 " + "aa" * 32, None),
        Change("salt", "", "2"),
    ]


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [
        (["a", "b"], ["b", "a"], [Change("commands:order", "a; b", "b; a")]),
        (["a", "b"], ["x", "a", "b"], [Change("commands:1", None, "x")]),
        (["a", "b"], ["a"], [Change("commands:2", "b", None)]),
        (["a", "b"], ["a", "c"], [Change("commands:2", "b", "c")]),
        (["a"], ["a", "a"], [Change("commands:2", None, "a")]),
    ],
)
def test_differences_of_lists(was: list[str], now: list[str], expected: list[Change]) -> None:
    old, new = (msgspec.structs.replace(DOCUMENT, commands=each) for each in (was, now))
    assert differences(old, new) == expected


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", IntegrityError),
        (b"[]", IntegrityError),
        (b"\xff", IntegrityError),
        (b"[" * 100_000, IntegrityError),
        (b'{"format":"bootseer-env-key/3"}', FormatVersion),
        (b'{"format":"bootseer-env-key/2"}', IntegrityError),
        (b'{"format":"bootseer-env-key/1"}', IntegrityError),
        (encode(DOCUMENT)[:-1] + b',"more":1}', IntegrityError),
        (encode(DOCUMENT).replace(b'"gcc-12"', b"12"), IntegrityError),
        (b" " * (MAX_DOCUMENT_BYTES + 1), IntegrityError),
    ],
)
def test_what_is_no_document_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^here: "):
        decode(data, "here")


def test_too_large_names_the_part() -> None:
    large = msgspec.structs.replace(DOCUMENT, variables={"CC": "x" * MAX_DOCUMENT_BYTES})
    with pytest.raises(ConfigError, match="are variables"):
        encode(large)


def test_text_that_is_no_utf8_can_be_stored() -> None:
    text = b"caf\xe9".decode("utf-8", "surrogateescape")
    assert to_utf8_text(text) == "caf\\xe9"
    assert to_utf8_text("café") == "café"


# ---- secrets -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(
            (name, True)
            for name in ("HF_TOKEN", "TOKEN", "MY_API_KEY", "PASSWORD", "UV_INDEX_X_PASSWORD", "APIKEY")
        ),
        *((name, True) for name in ("AWS_SECRET_ACCESS_KEY", "GIT_CREDENTIALS", "DB_PASS", "PYPI_AUTH", "MONKEY")),
        *((name, False) for name in ("TOKENIZERS_PARALLELISM", "PWD", "PIP_KEYRING_PROVIDER", "AUTHOR", "PATH")),
        *((name, False) for name in ("BYPASS", "KEYBOARD", "CC", "PATCH", "COMPASS")),
    ],
)
def test_names_of_secrets(name: str, expected: bool) -> None:
    assert is_secret_name(name) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pip install --index-url https://me:hunter22@h.org/simple a==1", "https://(secret)@h.org/simple a==1"),
        ("pip install 'https://hunter22@h/a.whl#sha256=00'", "https://(secret)@h/a.whl#sha256=00'"),
        ("uv pip install 'git+https://u:hunter22@h/r@v1'", "git+https://(secret)@h/r@v1'"),
        ("https://u:hunt/er22@h/r@v1", "https://(secret)@v1"),
        ("https://u:p@ss?hunter22@h/r", "https://(secret)@h/r"),
        ("https://u:hun;ter22@h/r", "https://(secret)@h/r"),
        ("--extra-index-url 'https://h/s?token=hunter22&version=2'", "?token=(secret)&version=2'"),
        (
            "https://h/a.whl?X-Amz-Signature=hunter22&X-Amz-Date=hunter22&job=build",
            "X-Amz-Signature=(secret)&X-Amz-Date=(secret)&job=build",
        ),
        ("https://h/a?se=hunter22&sp=hunter22&x=hunter4fYh1kQ9zRt7WvB2", "se=(secret)&sp=(secret)&x=(secret)"),
        ("https://h:8080/a?sig=hunter22&x=1", "https://h:8080/a?sig=(secret)&x=1"),
        ("HF_TOKEN=hunter22 pip install a", "HF_TOKEN=(secret) pip install a"),
        ("export DB_PASSWORD='hunter 22' && x", "DB_PASSWORD=(secret) && x"),
        ("login --token hunter22 --user me", "--token (secret) --user me"),
        ("login --api-key=hunter22", "--api-key=(secret)"),
        ("login --password=-hunter22", "--password=(secret)"),
        ("curl -u me:hunter22 https://h", "curl -u (secret) https://h"),
        ("curl -H 'Authorization: Bearer hunter22' h", "Authorization: (secret)' h"),
        ("echo machine h login me password hunter22", "password (secret)"),
        ("hf login hf_AbCdEfGhIjKlMnOpQrStUv", "hf login (secret)"),
    ],
)
def test_secrets_are_taken_out(text: str, expected: str) -> None:
    found = redact_text(text)
    assert "hunter" not in found
    assert found.endswith(expected) or expected in found
    assert redact_text(found) == found


@pytest.mark.parametrize(
    "text",
    [
        "pip install tokenizers==0.15.2 keyring>=24 authlib==1.2",
        "conda install tokenizers=0.15 secretstorage=3.3.1 passlib=1.7.4=py_0",
        "pip install git+https://host/org/repo@0123456789abcdef#egg=repo",
        "pip install --keyring-provider subprocess --use-pep517 a==1",
        "pip install 'a @ https://h/a-1.whl#sha256=0123' -c https://h:8443/c.txt",
        "pip install --index-url https://$HOST:$PORT/simple a",
        "TORCH_CUDA_ARCH_LIST=9.0 MAX_JOBS=4 pip install flash-attn==2.7",
        "wget --token $HF_TOKEN file:///a/b?c=d",
        "pip install 'https://ci/job/artifacts/main/a-1.whl?job=build&arch=cu128'",
        "pip install 'https://ci/download/a-1.whl?id=0b51f2b2-93b4-4d4f-9b8c-3f2a9c1b7d10&build=12#part=3'",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    """Hidden, two different versions would have one key."""
    assert redact_text(text) == text


secrets = st.text(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/=_-.:!%", min_size=12, max_size=30
).map(lambda text: f"Zq{text}Zq")
PLACES = [
    "pip install --index-url https://user:{0}@host/simple a==1",
    "pip install --index-url https://{0}@host/simple a==1",
    "pip install --extra-index-url 'https://host/simple?token={0}' a",
    "pip install 'a @ https://host/a.whl?sig={0}'",
    "HF_TOKEN={0} python get.py",
    "export MY_SECRET={0} && pip install a",
    "tool --password={0} b",
    "tool --password '{0}' b",
    "curl -u 'me:{0}' https://host/x",
    "curl -H 'Authorization: Bearer {0}' https://host/x",
    "pip install git+https://oauth2:{0}@host/group/repo@main",
]


@pytest.mark.parametrize("place", PLACES)
@given(secret=secrets)
def test_no_secret_is_left_in_a_command(place: str, secret: str) -> None:
    if "//{0}@" in place:
        secret = secret.replace("/", "%2F")  # else it is a path with a revision behind it
    assert secret not in redact_text(place.format(secret))
    assert SECRET in redact_text(place.format(secret))


@given(secrets, st.text(max_size=20), st.text(max_size=20))
def test_the_value_of_a_secret_variable_is_hidden_anywhere(secret: str, before: str, after: str) -> None:
    values = secret_values({"SOME_TOKEN": secret, "OTHER": "visible"})
    assert values == [secret]
    assert secret not in redact_text(f"{before}{secret}{after}", values)
    assert redact_variable("SOME_TOKEN", secret) == SECRET
    assert secret not in redact_variable("PIP_INDEX_URL", f"https://u:{secret}@h/")


def test_short_values_are_not_looked_for() -> None:
    assert secret_values({"A_KEY": "a" * (MIN_VALUE - 1)}) == []
    assert redact_variable("A_KEY", "a") == SECRET
    assert redact_variable("A_KEY", "") == ""


def test_variables_that_are_users_or_passwords() -> None:
    assert user_variables("pip install -i https://$NAME:${WORD}@h/$PATH b @ https://h/$OTHER") == ["NAME", "WORD"]
