"""Takes the values of secrets out of what ranks say, before it is written or leaves the node.

This guards against accidents: a value that is printed, logged, or part of an error. A program that
means to give its secret away can always spell it differently.
"""

import base64
import json
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Final

from pydantic_core import from_json, to_json

# Shorter ones occur by chance, and could not be masked without masking half of the output.
MIN_SECRET_CHARACTERS: Final = 8


class Mask:
    """Masks the values of one gang's secrets.

    Args:
        secrets: By name.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        forms = {form: name for name, value in secrets.items() for form in _forms(value)}
        # The longest first: one secret may be part of another.
        self._forms = [(form, f"[secret {forms[form]}]") for form in sorted(forms, key=len)[::-1]]

    def text(self, text: str) -> str:
        """``text`` with the names of secrets in place of their values."""
        for form, shown in self._forms:
            text = text.replace(form, shown)
        return text

    def line(self, line: bytes) -> bytes:
        """The same for a line of output."""
        if not self._forms:
            return line
        return self.text(line.decode(errors="surrogateescape")).encode(errors="surrogateescape")

    def message(self, line: bytes) -> bytes:
        """The same for a line of JSON: a secret of digits must not tear a number that has them by chance."""
        masked = self.line(line)
        if masked == line:
            return line
        try:
            message = from_json(line)
        except ValueError:  # whoever reads it refuses it
            return masked
        return to_json(self._within(message), inf_nan_mode="constants")

    def _within(self, value: object) -> object:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(name): self._within(each) for name, each in value.items()}
        return [self._within(each) for each in value] if isinstance(value, list) else value


NOTHING_MASKED: Final = Mask({})


def _forms(value: str) -> Iterator[str]:
    """The value and each of its lines: as they are, as URLs, base64, ``repr`` and JSON write them.

    And as JSON writes those in turn: an error that quotes a value travels inside JSON.
    """
    for part in {value, *value.splitlines()}:
        if len(part) >= MIN_SECRET_CHARACTERS:
            in_urls = (urllib.parse.quote(part, safe=""), urllib.parse.quote_plus(part))
            plain = {part, repr(part)[1:-1], *in_urls, urllib.parse.quote(part), *_in_base64(part)}
            once = {json.dumps(form, ensure_ascii=a)[1:-1] for form in plain for a in (True, False)}
            twice = {json.dumps(form, ensure_ascii=a)[1:-1] for form in once for a in (True, False)}
            yield from plain | once | twice


def _in_base64(text: str) -> Iterator[str]:
    """What base64 makes of a text wherever it stands in another, as behind ``user:`` in Basic access.

    Without the letters at its ends that hold bits of what stands beside it.
    """
    content = text.encode(errors="surrogateescape")
    for before in range(3):
        first, end = -(-8 * before // 6), 8 * (before + len(content)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(before) + content)[first:end].decode()
