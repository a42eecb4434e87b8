"""Takes the values of secrets out of what ranks say, before it is written or leaves the node.

This guards against accidents: a value that is printed, logged, or part of an error. A program that
means to give its secret away can always spell it differently.
"""

import base64
import itertools
import json
import urllib.parse
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from pydantic_core import from_json, to_json

from services.contract.system.long_work import uncollected

# Shorter ones occur by chance, and could not be masked without masking half of the output.
MIN_SECRET_CHARACTERS: Final = 8
_MOST_ONE_BY_ONE: Final = 256
_SHORTEST_BEGINNING: Final = 4  # of a secret; shorter ones say little, and occur by chance
# faulthandler writes behind whatever stands there, and of names the first 500 letters.
_BEHIND_CUTS: Final = ("Fatal Python error: ", "Current thread 0x", "Thread 0x", '...", line ')
# Places of one text at which a secret seems to begin, more than stacks have. Each takes a microsecond, and a rank may
# write a line of a megabyte that has them throughout.
_MOST_LOOKED_AT: Final = 1 << 15
# Half of a surrogate pair, which neither JSON nor a secret has.
_BETWEEN: Final = "\ud800"
# As faulthandler writes what cannot be seen.
_UNSEEN: Final = {code: f"\\x{code:02x}" for code in (*range(0x20), 0x7F)}
_Found = tuple[int, int, str]


class Mask:
    """Masks the values of one gang's secrets.

    A secret may have thousands of lines, and the agent masks a megabyte of what a rank says in its loop. So
    where there are many forms they are not looked for one by one: each is found by eight characters of it.

    Args:
        secrets: By name.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._forms = {form: name for name, value in secrets.items() for form in _forms(value)}
        self._windows = _windows(self._forms) if len(self._forms) > _MOST_ONE_BY_ONE else {}
        self._longest = max(map(len, self._forms), default=0)
        self._sorted = sorted(self._forms)
        self._beginnings = {form[:_SHORTEST_BEGINNING] for form in self._forms}

    def text(self, text: str) -> str:
        """``text`` with the names of secrets in place of their values."""
        return self._masked(text, itertools.chain(self._found(text), self._torn(text)))

    def cut_text(self, text: str) -> str:
        """The same of a text whose end is missing: what may be the beginning of a secret there is masked, too."""
        begun = self._begun(text, 0, len(text), iter(range(_MOST_LOOKED_AT)))
        return self._masked(text, itertools.chain(self._found(text), self._torn(text), begun))

    def _masked(self, text: str, found: Iterable[_Found]) -> str:
        parts, end = [], 0
        for start, stop, form in _joined(found):
            parts += [text[end:start], f"[secret {self._forms[form]}]"]
            end = stop
        return "".join((*parts, text[end:]))

    def _torn(self, text: str) -> Iterator[_Found]:
        """What stands within a text where another one goes on in the middle of it."""
        for behind in _BEHIND_CUTS if self._forms else ():
            start, at, looks = 0, text.find(behind), iter(range(_MOST_LOOKED_AT))
            while at >= 0:
                yield from self._begun(text, start, at, looks)
                start = at + len(behind)
                at = text.find(behind, start)

    def _begun(self, text: str, start: int, end: int, looks: Iterator[int]) -> Iterator[_Found]:
        """What stands before ``end`` in a text of a form that may go on behind it: the first, which holds all others.

        The last letter may be cut, too: then a replacement stands there. Each place at which one seems to begin takes
        one of ``looks``.
        """
        stop = end - text.endswith("\N{REPLACEMENT CHARACTER}", start, end)
        for at in range(max(stop - self._longest + 1, start), stop - _SHORTEST_BEGINNING + 1):
            if text[at : at + _SHORTEST_BEGINNING] in self._beginnings:
                if next(looks, None) is None:
                    return
                begun = text[at:stop]
                place = bisect_right(self._sorted, begun)  # behind the one that is not cut
                if any(form.startswith(begun) for form in self._sorted[place : place + 1]):
                    yield at, end, self._sorted[place]
                    return

    def _found(self, text: str) -> Iterator[_Found]:
        """Where forms stand in a text, and which."""
        if not self._windows:
            for form in self._forms:
                at = text.find(form)
                while at >= 0:
                    yield at, at + len(form), form
                    at = text.find(form, at + len(form))
            return
        size, windows = MIN_SECRET_CHARACTERS, self._windows
        for place in [p for p in range(len(text)) if text[p : p + size] in windows]:
            for within, form in windows[text[place : place + size]]:
                start = place - within
                if start >= 0 and text.startswith(form, start):
                    yield start, start + len(form), form

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
        with uncollected():
            try:
                message = from_json(line)
            except ValueError:  # whoever reads it refuses it
                return masked
            # All at once: to look for each form in each of a hundred thousand texts takes seconds.
            said = iter(self.text(_BETWEEN.join(_texts(message, []))).split(_BETWEEN))
            return to_json(_with_texts(message, said), inf_nan_mode="constants")


NOTHING_MASKED: Final = Mask({})


def _texts(value: object, found: list[str]) -> list[str]:
    """Adds all texts of a message, in the order in which ``_with_texts`` puts others in their place.

    To a list: a text that generators pass on takes a step for each level at which it stands.
    """
    if isinstance(value, str):
        found.append(value)
    elif isinstance(value, dict):
        for name, each in value.items():
            found.append(name)
            _texts(each, found)
    elif isinstance(value, list):
        for each in value:
            _texts(each, found)
    return found


def _with_texts(value: object, texts: Iterator[str]) -> object:
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, dict):
        return {next(texts): _with_texts(each, texts) for each in value.values()}
    return [_with_texts(each, texts) for each in value] if isinstance(value, list) else value


def _joined(found: Iterable[_Found]) -> Iterator[_Found]:
    """Those that overlap as one, of the longest of them: one secret may be part of another."""
    start = stop = 0
    longest = ""
    for begins, ends, form in sorted(found):
        if begins >= stop:
            if longest:
                yield start, stop, longest
            start, stop, longest = begins, ends, form
        else:
            stop, longest = max(stop, ends), max(longest, form, key=len)
    if longest:
        yield start, stop, longest


def _windows(forms: Iterable[str]) -> dict[str, list[tuple[int, str]]]:
    """Forms, with where in them they stand, by eight characters of each that few others have.

    Lines of a secret may begin or end alike, so the middle is looked at, too.
    """
    candidates = {form: _few_windows(form) for form in forms}
    counts = Counter(itertools.chain.from_iterable(candidates.values()))
    found: dict[str, list[tuple[int, str]]] = {}
    for form, windows in candidates.items():
        window = min(windows, key=counts.__getitem__)
        found.setdefault(window, []).append((windows[window], form))
    return found


def _few_windows(form: str) -> dict[str, int]:
    """Some of its windows, and where they stand."""
    last = len(form) - MIN_SECRET_CHARACTERS
    places = (0, last // 3, 2 * last // 3, last)
    return {form[place : place + MIN_SECRET_CHARACTERS]: place for place in places}


def _forms(value: str) -> Iterator[str]:
    """The value and each of its lines: as they are, as URLs, base64, ``repr`` (of their bytes, too), ``ascii`` and JSON write them.

    And as JSON writes those in turn: an error that quotes a value travels inside JSON.
    """
    for part in {value, *value.splitlines()}:
        if len(part) >= MIN_SECRET_CHARACTERS:
            in_urls = (urllib.parse.quote(part, safe=""), urllib.parse.quote_plus(part))
            plain = {
                part,
                *_in_repr(part),
                *in_urls,
                urllib.parse.quote(part),
                *_in_base64(part),
            }
            once = {json.dumps(form, ensure_ascii=a)[1:-1] for form in plain for a in (True, False)}
            twice = {json.dumps(form, ensure_ascii=a)[1:-1] for form in once for a in (True, False)}
            yield from plain | once | twice


def _in_repr(text: str) -> Iterator[str]:
    """What ``repr`` and ``ascii`` make of a text and of its bytes, alone and within others.

    Which quotes they escape depends on the whole: an apostrophe, where a double quote stands beside it. Python's
    stacks escape what is no ASCII, and what cannot be seen, a tab too, and no backslash or quote.
    """
    yield text.encode("ascii", "backslashreplace").decode().translate(_UNSEEN)
    for beside in ("", '"'):
        content = (text + beside).encode(errors="surrogateescape")
        end = -1 - len(beside)
        yield repr(text + beside)[1:end]
        yield ascii(text + beside)[1:end]
        yield repr(content)[2:end]


def _in_base64(text: str) -> Iterator[str]:
    """What base64 makes of a text wherever it stands in another, as behind ``user:`` in Basic access.

    Without the letters at its ends that hold bits of what stands beside it.
    """
    content = text.encode(errors="surrogateescape")
    for before in range(3):
        first, end = -(-8 * before // 6), 8 * (before + len(content)) // 6
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(before) + content)[first:end].decode()
