"""What a server of the center is told by anybody who reaches its port."""

from __future__ import annotations

import json

import pytest

from gluon_esgd.center.rule import decode, encode
from gluon_esgd.center.secret import sign, verify
from gluon_esgd.optim import Outer

from .mutation import Cases, bytes_, json_text, seeds

GOOD = {"momentum": 0.9, "learning_rate": 0.5}
SECRET, GENERATION = b"\x01" * 32, 7


def test_any_body_is_an_outer_step_or_refused():
    cases = Cases()
    for seed, random in seeds(0, 500):
        if seed % 2:
            body = json_text(random, GOOD).encode(errors="surrogatepass")
        else:
            body = bytes_(random, encode(Outer(**GOOD)).encode(), b"\xff\xfe[[[")
        cases.ends_well(seed, body, lambda b=body: _sane(decode(b)), ["outer", "Outer"])
    assert cases.count == 500 and cases.refused > 350


def _sane(outer):
    assert 0 <= outer.momentum < 1 and 0 < outer.learning_rate < float("inf")


def test_no_signed_command_that_was_changed_is_obeyed():
    cases, body = Cases(), encode(Outer(**GOOD))
    good = sign(SECRET, GENERATION, body)
    for seed, random in seeds(1000, 500):
        if seed % 2:
            text = json_text(random, json.loads(good)).encode(errors="surrogatepass")
        else:
            text = bytes_(random, good.encode(), sign(b"", GENERATION, body).encode())
        cases.ends_well(seed, text, lambda t=text: _same(verify(SECRET, GENERATION, t), body))
    assert cases.count == 500 and cases.refused > 400


def _same(found, body):
    assert found == body, "another body was let through"


@pytest.mark.parametrize(
    "text",
    [
        sign(b"", GENERATION, encode(Outer())),
        sign(SECRET, GENERATION + 1, encode(Outer())),
        sign(SECRET, -1, encode(Outer())),
    ],
)
def test_other_secrets_and_generations_are_refused(text):
    with pytest.raises(ValueError):
        verify(SECRET, GENERATION, text)
