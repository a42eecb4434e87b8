"""A bearer token's record, and whether what somebody shows is that token.

Only a plain SHA-256 of the secret is kept. A slow, salted hash protects what people choose, because
that can be guessed; the secret here is 256 random bits, which nobody guesses however fast the hash
is, and every request has to be checked.
"""

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Final

from services.contract.api.access import Scope
from services.contract.words.ids import TokenId
from services.controller.domain.record import Record

SECRET_BYTES: Final = 32
_TEXT: Final = re.compile(r"mlt_([0-9a-z]{26})_([A-Za-z0-9_-]{43})")


@dataclass(frozen=True)
class Principal:
    """Who asks, and what they may.

    ``token_id`` is None for whoever is at this machine while no token is wanted; that one is not
    limited in rate.
    """

    subject: str
    scope: Scope
    token_id: str | None = None


LOCAL: Final = Principal("local", Scope.OPERATOR)
BOOTSTRAP: Final = Principal("bootstrap", Scope.OPERATOR, "bootstrap")


class Token(Record):
    """What is kept of a token. Times in milliseconds of Redis's clock."""

    id: TokenId
    subject: str
    scope: Scope
    label: str = ""
    digest: str
    created_ms: int
    created_by: str
    expires_ms: int | None = None

    @property
    def principal(self) -> Principal:
        """Who its holder is."""
        return Principal(self.subject, self.scope, self.id)

    def has_expired(self, now_ms: int) -> bool:
        """Whether its time is over."""
        return self.expires_ms is not None and now_ms >= self.expires_ms

    def is_shown_by(self, secret: str) -> bool:
        """Whether this is its secret, in a time that tells nothing about it."""
        return hmac.compare_digest(digest_of(secret), self.digest)


def token_text(token_id: str, randomness: bytes) -> tuple[str, str]:
    """A token as its holder sends it, and the secret in it.

    Args:
        token_id: Its id, which the text carries so that one look finds the record.
        randomness: ``SECRET_BYTES`` random bytes.
    """
    if len(randomness) != SECRET_BYTES:
        raise ValueError(f"a secret is made of {SECRET_BYTES} bytes")
    secret = base64.urlsafe_b64encode(randomness).decode().rstrip("=")
    return f"mlt_{token_id.removeprefix('tok_')}_{secret}", secret


def parts_of(text: str) -> tuple[str, str] | None:
    """The id and the secret of what somebody sent; None if it is no token of ours."""
    found = _TEXT.fullmatch(text)
    return None if found is None else (f"tok_{found.group(1)}", found.group(2))


def digest_of(secret: str) -> str:
    """What is kept of a secret."""
    return hashlib.sha256(secret.encode()).hexdigest()
