"""DSSE envelopes: the specification's own examples, bounds, and that nothing but what was signed is believed."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import IntegrityError, Untrusted
from bootseer.trust import PublicKey, SigningKey, Trust, TrustedKey, parse, seal
from bootseer.trust.dsse import MAX_ENVELOPE_BYTES, MAX_SIGNATURES, Envelope, pae

TYPE = "application/vnd.in-toto+json"


def trusting(*publics: bytes) -> Trust:
    return Trust([TrustedKey(PublicKey(raw, "ada"), "/keys/ada.pub") for raw in publics])


# ---- the specification -------------------------------------------------------------------------------------

# github.com/secure-systems-lab/dsse, protocol.md: "Test Vectors".
SPEC = {
    "payload": "aGVsbG8gd29ybGQ=",
    "payloadType": "http://example.com/HelloWorld",
    "signatures": [
        {"sig": "A3JqsQGtVsJ2O2xqrI5IcnXip5GToJ3F+FnZ+O88SjtR6rDAajabZKciJTfUiHqJPcIAriEGAHTVeCUjW2JIZA=="}
    ],
}
SPEC_X = 46950820868899156662930047687818585632848591499744589407958293238635476079160
SPEC_Y = 5640078356564379163099075877009565129882514886557779369047442380624545832820


def test_vector_of_the_specification() -> None:
    """Its key is of another kind, so its own signature proves that we say what is signed as it does."""
    from cryptography.hazmat.primitives.asymmetric import ec, utils
    from cryptography.hazmat.primitives.hashes import SHA256

    envelope = parse(json.dumps(SPEC).encode(), "http://example.com/HelloWorld", "it")
    assert envelope.payload == b"hello world"
    assert envelope.signed == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    ((keyid, sig),) = envelope.signatures
    assert keyid == ""
    public = ec.EllipticCurvePublicNumbers(SPEC_X, SPEC_Y, ec.SECP256R1()).public_key()
    encoded = utils.encode_dss_signature(int.from_bytes(sig[:32], "big"), int.from_bytes(sig[32:], "big"))
    public.verify(encoded, envelope.signed, ec.ECDSA(SHA256()))
    assert trusting(SigningKey.make().public).find_signer(envelope, "it") is None, "not ed25519"


# The same repository, testvectors/vectors.json; its keys are those of RFC 8032, tests 1 and 2.
A = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
B = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
STATEMENT = "eyJfdHlwZSI6Imh0dHBzOi8vaW4tdG90by5pby9TdGF0ZW1lbnQvdjEifQ=="
BY_A = "2WAfaHm5jluo0w+0rk8uVkluELJYWjSmU9x7EUzx+AyteDGJ4/nqyJXfmAUVFIAoQafWm7AxBZNw5M9ixNHiCA=="
BY_B = "c1+67/aT0yqEpwx8PsVY3MLHsj9D0CZ014/Fv/QlG59P+9CobUZ7xECJ/V3USG0Ob9CiE5LjReEZUzNF2l7eBw=="
VECTORS = [
    ("single signature", STATEMENT, TYPE, [("A", BY_A)], [A], A),
    ("URL-safe base64", "-_-_Pj8=", TYPE,
     [("A", "P-_KHICeR7tI6S_YyejJTRtrXhcQyQ2LYPaL8h90KjC9qN8HU_svOQ6TuDOT1HIrsGW886DbWNWcCmX5twLrAw==")], [A], A),
    ("another type", STATEMENT, "application/vnd.example.other+json", [("A", BY_A)], [A], None),
    ("a type beyond ASCII", STATEMENT, "application/vnd.exämple+json",
     [("A", "xmSk/ug66ysT7ayhkCIjhAq42zgZXSsEWuzUaNL7w2eGAdF/NU6/fRXPtmfN+5DNSAs5/i2lUnHjbbjPsu0tAw==")], [A], A),
    ("empty payload", "", TYPE,
     [("A", "gSggCAaTLTYyRH6FIDBem6meyIynsYy8RTHVzwx9tnTb7Bg/1jMWnuVgI/gffqmbsC2VX5/jHfkkDqsj7CDbDg==")], [A], A),
    ("two signatures", STATEMENT, TYPE, [("A", BY_A), ("B", BY_B)], [B], B),
    ("no keyids", STATEMENT, TYPE, [(None, BY_A), (None, BY_B)], [A, B], A),
    ("nobody who is trusted", STATEMENT, TYPE, [("A", BY_A)], [B], None),
    ("keyids exchanged", STATEMENT, TYPE, [("B", BY_A)], [A], A),  # only hints
]  # fmt: skip


@pytest.mark.parametrize(("what", "payload", "kind", "signatures", "trusted", "signer"), VECTORS)
def test_vectors_of_the_specification(
    what: str, payload: str, kind: str, signatures: list[Any], trusted: list[bytes], signer: bytes | None
) -> None:
    wire = {
        "payload": payload,
        "payloadType": kind,
        "signatures": [{"sig": sig} | ({"keyid": keyid} if keyid else {}) for keyid, sig in signatures],
    }
    found = trusting(*trusted).find_signer(parse(json.dumps(wire).encode(), kind, "it"), "it")
    assert (found.key.raw if found else None) == signer


def test_type_counts_in_bytes() -> None:
    assert pae("ä", b"\0\xff") == b"DSSEv1 2 \xc3\xa4 2 \0\xff"
    assert pae("", b"") == b"DSSEv1 0  0 "


@given(
    st.tuples(st.text(max_size=9), st.binary(max_size=9)), st.tuples(st.text(max_size=9), st.binary(max_size=9))
)
def test_nothing_else_has_the_same_encoding(one: tuple[str, bytes], other: tuple[str, bytes]) -> None:
    try:
        assert (pae(*one) == pae(*other)) == (one == other)
    except UnicodeEncodeError:
        pass  # no type of an envelope


# ---- ours --------------------------------------------------------------------------------------------------

ADA, EVE, BOB = (SigningKey.make(name=name) for name in ("ada", "eve", "bob"))
SIGNED = seal(b'{"a":1}', TYPE, ADA, EVE)


@given(st.binary(max_size=300), st.sampled_from(["", "a", TYPE]), st.integers(0, 3))
def test_what_is_sealed_is_parsed_again(payload: bytes, kind: str, count: int) -> None:
    keys = [ADA, EVE, BOB][:count]
    data = seal(payload, kind, keys[0], *keys[1:]) if keys else seal(payload, kind, None)
    envelope = parse(data, kind, "it")
    assert (envelope.payload, envelope.payload_type) == (payload, kind)
    assert [each.keyid for each in envelope.signatures] == [key.keyid for key in keys]
    for key in (ADA, EVE, BOB):
        found = trusting(key.public).find_signer(envelope, "it")
        assert (found is not None) == (key in keys)


def test_other_tools_can_read_it() -> None:
    found = json.loads(SIGNED)
    assert list(found) == ["payload", "payloadType", "signatures"]
    assert base64.b64decode(found["payload"]) == b'{"a":1}'
    assert [sorted(each) for each in found["signatures"]] == [["keyid", "sig"], ["keyid", "sig"]]
    assert json.loads(seal(b"", TYPE, None))["signatures"] == []


def test_fields_of_newer_tools_are_left_out() -> None:
    wire = json.loads(SIGNED) | {"extension": {"a": 1}}
    wire["signatures"][0]["cert"] = "..."
    assert parse(json.dumps(wire).encode(), TYPE, "it") == parse(SIGNED, TYPE, "it")


@given(st.integers(0, len(SIGNED) * 8 - 1))
def test_a_flipped_bit_is_never_trusted_as_something_else(place: int) -> None:
    data = bytearray(SIGNED)
    data[place // 8] ^= 1 << place % 8
    try:
        envelope = parse(bytes(data), TYPE, "it")
        found = trusting(ADA.public).find_signer(envelope, "it")
    except IntegrityError as error:
        assert str(error).startswith("it: ")
        return
    if found is not None:
        assert (envelope.payload, envelope.payload_type) == (b'{"a":1}', TYPE), "a bit that says nothing"


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"^it: "):
        parse(data, TYPE, "it")


def altered(**fields: Any) -> bytes:
    return json.dumps(json.loads(SIGNED) | fields).encode()


SIG = {"keyid": "a", "sig": base64.b64encode(bytes(64)).decode()}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not a DSSE envelope"),
        (b"[]", "is not a DSSE envelope"),
        (b"[" * 50_000, "is not a DSSE envelope"),
        (SIGNED[:-1], "is not a DSSE envelope"),
        (SIGNED + b"x", "is not a DSSE envelope"),
        (altered(payload=None), "is not a DSSE envelope"),
        (altered(payload=[1]), "is not a DSSE envelope"),
        (altered(payload="*"), "is not a DSSE envelope"),
        (altered(payload="YQ"), "is not a DSSE envelope"),
        (altered(payload="YQ=="[:3]), "is not a DSSE envelope"),
        (altered(payload="YQ==\n"), "is not a DSSE envelope"),
        (altered(payload="ä==="), "is not a DSSE envelope"),
        (altered(signatures=None), "is not a DSSE envelope"),
        (altered(signatures={}), "is not a DSSE envelope"),
        (altered(signatures=[{"keyid": "a"}]), "is not a DSSE envelope"),
        (altered(signatures=[{"sig": 1}]), "is not a DSSE envelope"),
        (altered(payloadType="other"), "holds 'other' instead of"),
        (altered(payloadType="x" * 999), "holds 'xxx"),
        (altered(payloadType=None), "is not a DSSE envelope"),
        (altered(signatures=[SIG] * (MAX_SIGNATURES + 1)), "has 17 signatures; at most 16"),
        (altered(signatures=[SIG | {"keyid": "x" * 257}]), "too long"),
        (altered(signatures=[SIG | {"sig": "A" * 2052}]), "too long"),
        (b'"\xff"', "is not a DSSE envelope"),
        (altered(more="x" * MAX_ENVELOPE_BYTES), "at most 65536"),
    ],
)
def test_what_is_no_envelope_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(IntegrityError, match=f"^it: .*{text}"):
        parse(data, TYPE, "it")


def test_sizes_are_as_the_caller_says() -> None:
    assert len(parse(altered(signatures=[SIG] * MAX_SIGNATURES), TYPE, "it").signatures) == MAX_SIGNATURES
    assert parse(SIGNED, TYPE, "it", max_bytes=len(SIGNED))
    with pytest.raises(IntegrityError, match="at most"):
        parse(SIGNED, TYPE, "it", max_bytes=len(SIGNED) - 1)
    large = seal(bytes(1 << 20), TYPE, ADA)
    assert parse(large, TYPE, "it", max_bytes=16 << 20).payload == bytes(1 << 20)


def test_a_wrong_signature_of_a_trusted_key_is_refused_whatever_else_there_is() -> None:
    signed = parse(SIGNED, TYPE, "it")
    other = Envelope(b"other", TYPE, signed.signatures)
    for trust in (trusting(ADA.public), trusting(EVE.public), trusting(BOB.public, EVE.public)):
        with pytest.raises(Untrusted, match=r"it: was changed after ada .* signed it"):
            trust.find_signer(other, "it")
    by_bob = parse(seal(b"other", TYPE, BOB), TYPE, "it")
    mixed = Envelope(b"other", TYPE, (*by_bob.signatures, signed.signatures[0]))
    assert trusting(BOB.public).find_signer(mixed, "it") is not None, "a signature by a stranger says nothing"
    with pytest.raises(Untrusted):
        trusting(BOB.public, ADA.public).find_signer(mixed, "it")
    short = Envelope(b"other", TYPE, (signed.signatures[0]._replace(sig=b"x"),))
    with pytest.raises(Untrusted):
        trusting(ADA.public).find_signer(short, "it")
