"""Signed commands: what is taken, and all that is not."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any, Dict

import pytest

from gluon_esgd.center.secret import LARGEST, sign, verify

SECRET = b"\x01" * 32


@pytest.mark.parametrize("secret", [SECRET, b""])
@pytest.mark.parametrize("body", ["", '{"momentum": 0.9}', "ü\0\n\ud800"])
def test_what_was_signed_is_taken(secret: bytes, body: str) -> None:
    text = sign(secret, 7, body)
    assert text.isascii() and "\0" not in text
    assert verify(secret, 7, text) == verify(secret, 7, text.encode()) == body


def test_the_digest_is_over_generation_and_body() -> None:
    fields = json.loads(sign(SECRET, 7, "text"))
    assert fields == {
        "body": "text",
        "generation": 7,
        "digest": hmac.new(SECRET, b"7|text", hashlib.sha256).hexdigest(),
    }


def changed(**changes: Any) -> str:
    fields: Dict[str, Any] = {**json.loads(sign(SECRET, 7, "text")), **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


FALSE = [
    (sign(b"", 7, "text"), "wrong digest"),
    (sign(b"\x02" * 32, 7, "text"), "wrong digest"),
    (changed(body="texts"), "wrong digest"),
    (changed(digest="0" * 64), "wrong digest"),
    (changed(digest=""), "wrong digest"),
    (changed(digest="ü\ud800"), "wrong digest"),
    (sign(SECRET, 6, "text"), "not of generation 7"),
    (changed(generation=8), "not of generation 7"),
    (changed(generation=7.0), "not of generation 7"),
    (changed(generation="7"), "not of generation 7"),
    (changed(body=1), "must be texts"),
    (changed(digest=None), "must be texts"),
    (changed(digest=...), "other fields"),
    (changed(more=1), "other fields"),
    ("[]", "other fields"),
    ("7", "other fields"),
    ("", "no JSON"),
    (b"\xff\xfe\x00", "no JSON"),
    (changed()[:-1], "no JSON"),
    ("[" * LARGEST, "nested too deep"),
    ("[" * (LARGEST + 1), "4097 bytes, over the limit of 4096"),
    (sign(SECRET, 7, "x" * LARGEST), "over the limit"),
]


@pytest.mark.parametrize(("text", "said"), FALSE)
def test_what_was_not_is_refused(text: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        verify(SECRET, 7, text)


def test_true_and_seven_are_not_one_another() -> None:
    with pytest.raises(ValueError, match="not of generation 1"):
        verify(SECRET, 1, json.dumps({**json.loads(sign(SECRET, 1, "")), "generation": True}))
