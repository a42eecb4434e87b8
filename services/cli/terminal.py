r"""What the command line writes: data are shown as data, whatever they hold.

Names, errors and log lines come from jobs and from whoever reaches the controller. Brackets in them are
no markup, and a control character, which a terminal would obey, is shown as an escape (``\x1b``). Where a text has
several lines, only the first stands where our own words begin; the terminal wraps a long one as it likes.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Span, Text

from services.contract.words.control_characters import harmless

_WIDTH: Final = 80
_FURTHER_LINE: Final = re.compile(r"(?<!^)\n(?=[^ \n])")


def indented(text: str) -> str:
    """``text`` with its further lines behind a blank: at a line's beginning they could pose as our own words.

    What it begins with may be an empty line.
    """
    return _FURTHER_LINE.sub("\n  ", text)


class Terminal(Console):
    """A console that reads no markup and obeys no control characters of what it is given.

    Args:
        options: As of rich's ``Console``.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 passed through to rich
        super().__init__(markup=False, emoji=False, highlight=False, **options)
        if self.width < 1:  # as COLUMNS=0 says, with which nothing would be printed
            self.width = _WIDTH

    def render_str(self, text: str, **options: Any) -> Text:  # noqa: ANN401 passed through to rich
        """A string as text, before its width is measured."""
        return super().render_str(_shown(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Also what was made a ``Text`` before."""
        if isinstance(renderable, Text):
            renderable = _harmless_text(renderable)
        return super().render(renderable, options)


# Soft wrap: a line that is longer than the terminal is broken by the terminal, so that what is copied from it
# has no line break in it.
console: Final = Terminal(soft_wrap=True)
errors: Final = Terminal(stderr=True, soft_wrap=True)


def _shown(text: str) -> str:
    return harmless(indented(text))


def _harmless_text(text: Text) -> Text:
    clean_text = _shown(text.plain)
    if clean_text == text.plain:
        return text

    def moved(place: int) -> int:
        return len(_shown(text.plain[:place]))

    clean = text.blank_copy(clean_text)
    clean.spans = [Span(moved(start), moved(end), style) for start, end, style in text.spans]
    return clean
