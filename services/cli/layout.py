"""Tables and lists that fit the terminal: less important columns are left out, and nothing to copy is cut.

A person copies ids, paths and digests. They stand whole in one line, even where that line then is longer than
the terminal is wide. Names may be cut, with a mark; sentences are wrapped between words.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeAlias, TypeVar

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from services.cli.output import is_wide
from services.contract.words.control_characters import harmless, one_line

Cell = str | Text
_R = TypeVar("_R")
_GAP: Final = 2
_INDENT: Final = 4
_NARROWEST: Final = 20
_UNKNOWN: Final = frozenset({"", "-"})
_CUT: Final = "…"


class Exact(str):
    """A value that a person copies: it stands in a line of its own if need be, and is never cut or wrapped."""

    __slots__ = ()


@dataclass(frozen=True)
class Column(Generic[_R]):
    """A column of a table.

    Attributes:
        title: Its heading.
        cell: What a row has there.
        drop: 0: always shown. Of the others the highest are left out first where the terminal is narrow,
            and those in which no row has anything.
        fit: ``whole`` is never cut; ``cut`` may be, down to ``least`` cells; ``note`` is a sentence: it
            stands at the end of the row if all rows have room for it, else below the row.
        least: Cells that a ``cut`` column has at least.
    """

    title: str
    cell: Callable[[_R], Cell]
    drop: int = 0
    fit: Literal["whole", "cut", "note"] = "whole"
    least: int = 12


Columns: TypeAlias = Sequence[Column[_R]]


class FittedTable(Generic[_R]):
    """Rows under headings, as wide as the console at most.

    Args:
        columns: In their order, a ``note`` last.
        rows: In their order.
        wide: All columns, nothing cut or wrapped; None: as the command's format says.
    """

    def __init__(
        self, columns: Columns[_R], rows: Iterable[_R], *, wide: bool | None = None
    ) -> None:
        self._columns = columns
        self._cells = [[_text(each.cell(row), each.fit) for each in columns] for row in rows]
        self._wide = is_wide() if wide is None else wide

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Its lines for a console of this width."""
        width = 1 << 30 if self._wide else options.max_width
        shown = self._shown(width)
        widths = self._widths(shown, width)
        note = next((i for i, each in enumerate(self._columns) if each.fit == "note"), None)
        taken = sum(widths) + _GAP * len(widths)
        inline = note is not None and taken + self._natural(note) <= width
        if inline and note is not None and self._is_told(note):
            shown, widths = [*shown, note], [*widths, self._natural(note)]
        titles = (Text(self._columns[i].title) for i in shown)
        yield _row(titles, widths, "bold dim")
        for cells in self._cells:
            yield _row((cells[i] for i in shown), widths)
            if note is not None and not inline and cells[note].plain:
                yield from _wrapped(cells[note], width - _INDENT, " " * _INDENT)

    def _natural(self, index: int) -> int:
        titled = cell_len(self._columns[index].title)
        return max([titled, *(_width(cells[index]) for cells in self._cells)])

    def _least(self, index: int) -> int:
        natural, about = self._natural(index), self._columns[index]
        return min(natural, max(about.least, len(about.title))) if about.fit == "cut" else natural

    def _is_told(self, index: int) -> bool:
        return self._wide or any(cells[index].plain not in _UNKNOWN for cells in self._cells)

    def _shown(self, width: int) -> list[int]:
        """The columns for which there is room, by their importance."""
        shown: list[int] = []
        free = width + _GAP
        for index in sorted(range(len(self._columns)), key=lambda i: self._columns[i].drop):
            about = self._columns[index]
            needed = self._least(index) + _GAP
            must = about.drop == 0
            if about.fit == "note" or not (must or (needed <= free and self._is_told(index))):
                continue
            shown.append(index)
            free -= needed
        return sorted(shown)

    def _widths(self, shown: Sequence[int], width: int) -> list[int]:
        """How wide each column is: what is left over goes to those that would be cut."""
        widths = {index: self._least(index) for index in shown}
        free = width - sum(widths.values()) - _GAP * (len(shown) - 1)
        for index in sorted(shown, key=lambda i: self._columns[i].drop):
            more = max(min(self._natural(index) - widths[index], free), 0)
            widths[index] += more
            free -= more
        return [widths[index] for index in shown]


class Details:
    """Names and values, one below the other; values of None are left out.

    Args:
        rows: A value of type ``Exact`` is never wrapped; others are, between words.
        wide: Nothing is wrapped; None: as the command's format says.
    """

    def __init__(
        self, rows: Iterable[tuple[Cell, Cell | None]], *, wide: bool | None = None
    ) -> None:
        self._rows = [
            (_text(name, "whole"), _text(value, "note"), isinstance(value, Exact))
            for name, value in rows
            if value is not None
        ]
        self._wide = is_wide() if wide is None else wide

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Its lines for a console of this width."""
        named = max((_width(name) for name, _, _ in self._rows), default=0) + _GAP
        room = 1 << 30 if self._wide else max(options.max_width - named, _NARROWEST)
        for name, value, is_exact in self._rows:
            lines = [value] if is_exact else [*_wrapped(value, room, "")]
            for number, line in enumerate(lines):
                label = name.plain if number == 0 else ""
                row = _line(Text(label + " " * (named - cell_len(label)), style="bold"))
                yield row.append_text(line)


class Flow:
    """Short parts one behind the other, and over several lines where there are many."""

    def __init__(self, parts: Iterable[Text]) -> None:
        self._parts = list(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Its lines for a console of this width."""
        line = _line(Text())
        for part in self._parts:
            if line.plain and _width(line) + _GAP + _width(part) > options.max_width:
                yield line
                line = _line(Text())
            line.append(" " * _GAP * bool(line.plain)).append_text(part)
        yield line


def _text(cell: Cell, fit: str) -> Text:
    """A cell, harmless; only a sentence may have several lines."""
    plain = cell if isinstance(cell, str) else cell.plain
    clean = harmless(plain).rstrip() if fit == "note" else one_line(plain)
    return Text(clean, style="" if isinstance(cell, str) else cell.style)


def _width(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))


def _row(cells: Iterable[Text], widths: Sequence[int], style: str | Style = "") -> Text:
    line = Text(style=style)
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        is_last = number == len(widths) - 1
        first, *more = cell.plain.split("\n")
        line.append(_fitted(first, width, pad=not is_last), cell.style)
        before = sum(widths[:number]) + _GAP * number
        for each in more:  # only of a sentence at the row's end
            line.append("\n" + " " * before + each, cell.style)
        if not is_last:
            line.append(" " * _GAP)
    return _line(line)


def _fitted(text: str, width: int, *, pad: bool) -> str:
    if cell_len(text) > width:
        return set_cell_size(text, width - 1).rstrip() + _CUT + " " * 0
    return text + " " * (width - cell_len(text)) if pad else text


def _wrapped(text: Text, width: int, indent: str) -> Iterator[Text]:
    """Lines of at most ``width`` cells, unless one word is longer: it may be an id or a path."""
    for paragraph in text.plain.split("\n"):
        line = ""
        for word in _words(paragraph):
            if line.strip() and cell_len(line) + cell_len(word.rstrip()) > width:
                yield _line(Text(indent + line.rstrip(), style=text.style))
                line = ""
            line += word
        yield _line(Text(indent + line.rstrip(), style=text.style))


def _words(text: str) -> Iterator[str]:
    """Words, each with the blanks behind it, those before the first one at its front."""
    word = ""
    for position, character in enumerate(text):
        is_blank_before = position > 0 and text[position - 1] == " "
        if character != " " and is_blank_before and word.strip():
            yield word
            word = ""
        word += character
    yield word


def _line(text: Text) -> Text:
    text.no_wrap = True
    text.overflow = "ignore"
    return text
