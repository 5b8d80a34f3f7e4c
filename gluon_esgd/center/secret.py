"""The digest by which a server knows that a command comes from its own job and generation.

The launcher makes a secret for each job. A command travels as JSON,
``{"body", "generation", "digest"}``, where the digest is the HMAC-SHA256 under
the secret of ``generation|body``. It keeps strangers and agents of other
generations from being obeyed; it hides nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Union

__all__ = ["LARGEST", "sign", "verify"]

LARGEST = 4096  # bytes of a command; a longer one is not parsed


def sign(secret: bytes, generation: int, body: str) -> str:
    """Return `body` as the text that `verify` takes under the same secret and generation.

    Parameters
    ----------
    secret : bytes
        May be empty, for servers that were started by hand: anybody can then sign.
    generation : int
    body : str

    Returns
    -------
    str
        ASCII without NUL, as ps-lite wants it.
    """
    fields = {"body": body, "generation": generation, "digest": _digest(secret, generation, body)}
    return json.dumps(fields)


def verify(secret: bytes, generation: int, text: Union[str, bytes]) -> str:
    """Return the body of a text that anybody may have sent.

    Raises
    ------
    ValueError
        Where it is too long, not what `sign` makes, of another generation, or signed with another
        secret. The message does not repeat the text.
    """
    if len(text) > LARGEST:
        raise ValueError(f"{len(text)} bytes, over the limit of {LARGEST}")
    try:
        fields = json.loads(text)
    except RecursionError:
        raise ValueError("not a signed command: nested too deep") from None
    except ValueError:
        raise ValueError("not a signed command: no JSON") from None
    if not isinstance(fields, dict) or set(fields) != {"body", "generation", "digest"}:
        raise ValueError("not a signed command: other fields")
    body, digest = fields["body"], fields["digest"]
    if not isinstance(body, str) or not isinstance(digest, str):
        raise ValueError("not a signed command: body and digest must be texts")
    if type(fields["generation"]) is not int or fields["generation"] != generation:
        raise ValueError(f"not of generation {generation}")
    wanted = _digest(secret, generation, body)
    if not hmac.compare_digest(wanted.encode(), digest.encode(errors="replace")):
        raise ValueError("wrong digest")
    return body


def _digest(secret: bytes, generation: int, body: str) -> str:
    signed = f"{generation}|{body}".encode(errors="surrogatepass")
    return hmac.new(secret, signed, hashlib.sha256).hexdigest()
