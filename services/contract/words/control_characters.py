r"""Text of others for a terminal: a control character, which it would obey, as an escape (``\x1b``)."""

import re
from typing import Final

# C0 and C1, the marks that turn the direction of a line, and half of a surrogate pair, which no stream
# can carry. U+2028 and U+2029 end lines in some terminals.
_OTHERS: Final = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE: Final = re.compile(f"[\x00-\x08\x0b-\x1f{_OTHERS}]")
_UNSAFE_IN_A_LINE: Final = re.compile(f"[\x00-\x1f{_OTHERS}]")


def harmless(text: str) -> str:
    """``text`` with every control character as an escape; lines and tabs stay."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """As ``harmless``, in one line: what follows a line break could pose as another entry."""
    return _UNSAFE_IN_A_LINE.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
