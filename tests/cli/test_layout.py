"""Every table fits the terminal, and what a person copies stands in it whole."""

import io
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import RenderableType
from rich.text import Text

from services.cli import access, checkpoint_tables, cluster_tables, plan_tables, tables
from services.cli.layout import Column, Details, Exact, FittedTable
from services.cli.output import Format, chosen
from services.cli.terminal import Terminal
from services.cli.webhooks import webhooks_table
from services.contract.api.views import JobPage, Progress
from tests.cli import views


def shown(make: Callable[[], RenderableType], width: int, how: Format = Format.TABLE) -> str:
    screen = io.StringIO()
    with chosen(how):
        Terminal(file=screen, width=width, soft_wrap=True).print(make())
    return screen.getvalue()


_LABEL = 16
CASES: dict[str, tuple[Callable[[], RenderableType], list[str]]] = {
    "ls": (
        lambda: tables.jobs_table(views.jobs()),
        [views.ids(number)["job"] for number in range(3)],
    ),
    "queue": (lambda: cluster_tables.queue_table(views.queue()), [views.ids(2)["job"], "x" * 40]),
    "plans": (lambda: plan_tables.plans_table(views.plans()), [views.ids(1)["plan"], "x" * 40]),
    "checkpoints": (
        lambda: checkpoint_tables.checkpoints_table(views.checkpoints()),
        [views.ids(number)["checkpoint"] for number in range(3)],
    ),
    "export": (
        lambda: checkpoint_tables.checkpoint_details(views.checkpoint()),
        [views.ids(0)["checkpoint"], views.FOLDER, "model-00001-of-00002.safetensors"],
    ),
    "nodes": (
        lambda: cluster_tables.nodes_table(views.nodes()),
        [views.NODE, *(views.ids(number)["job"] for number in range(4))],
    ),
    "capacity": (lambda: cluster_tables.capacity_table(views.capacity()), [views.NODE]),
    "pools": (
        lambda: cluster_tables.pools_table(views.pools()),
        [views.ids(0)["job"], "no route to host"],
    ),
    "tokens": (lambda: access.tokens_table(views.tokens()), [views.ids(0)["token"]]),
    "audit": (
        lambda: access.audit_table(views.audit()),
        [f"/v1/checkpoints/{views.ids(0)['checkpoint']}/verify"],
    ),
    "webhooks": (
        lambda: webhooks_table(views.webhooks()),
        [views.ids(0)["webhook"], "x" * 40],
    ),
    "attempts": (lambda: tables.attempts_table(views.attempts()), ["restarts_exhausted"]),
    "ranks": (lambda: tables.ranks_table(views.ranks()), ["65535", "999999"]),
    "events": (lambda: tables.events_table(views.events()), [views.ids(0)["checkpoint"]]),
    "status": (
        lambda: tables.job_details(views.job()),
        [views.ids(0)["job"], views.ids(0)["checkpoint"], "sha256:" + "ab" * 32, views.LONG_NAME],
    ),
}


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", CASES)
def test_a_table_fits_and_what_a_person_copies_is_whole(name: str, width: int) -> None:
    make, copied = CASES[name]
    text = shown(make, width)
    for value in copied:
        assert value in text, text
    for line in text.splitlines():
        # Only what is copied, and alone takes the whole width, may stand in a longer line.
        alone = max((cell_len(value) for value in copied if value in line), default=0)
        assert cell_len(line) <= width or alone + _LABEL > width, line


@pytest.mark.parametrize("name", CASES)
def test_wide_leaves_nothing_out(name: str) -> None:
    make, _ = CASES[name]
    narrow, wide = shown(make, 60), shown(make, 60, Format.WIDE)
    assert "…" not in wide
    assert len(wide) >= len(narrow) - narrow.count("\n") * 60
    headings = max((line.split() for line in [wide.splitlines()[0]]), key=len)
    assert set(narrow.splitlines()[0].split()) <= set(headings)


def test_the_least_important_columns_go_first() -> None:
    first = shown(CASES["ls"][0], 80).splitlines()[0].split()
    assert first[:3] == ["job", "name", "state"]
    assert "owner" not in first
    widest = shown(CASES["ls"][0], 300).splitlines()[0].split()
    assert widest == [
        *("job", "name", "state", "step", "loss", "throughput", "eta", "age", "priority", "owner")
    ]


COLUMNS = (
    Column[tuple[str, str, str]]("id", lambda row: row[0]),
    Column[tuple[str, str, str]]("name", lambda row: row[1], fit="cut", least=6),
    Column[tuple[str, str, str]]("why", lambda row: row[2], fit="note"),
)


def test_a_column_in_which_nothing_is_known_is_left_out_unless_all_are_wanted() -> None:
    def page() -> RenderableType:
        plain = views.job(name="a", priority=0, progress=Progress(step=0, of=None))
        return tables.jobs_table(JobPage(items=(plain,)))

    assert shown(page, 300).split("\n")[0].split() == [
        "job",
        "name",
        "state",
        "step",
        "age",
        "owner",
    ]
    assert "throughput" in shown(page, 80, Format.WIDE)


def test_a_sentence_stands_below_its_row_unless_all_have_room() -> None:
    rows = [("1", "first", "short"), ("2", "second", "a sentence of some words")]
    assert shown(lambda: FittedTable(COLUMNS, rows), 40).splitlines() == [
        "id  name    why",
        "1   first   short",
        "2   second  a sentence of some words",
    ]
    assert shown(lambda: FittedTable(COLUMNS, rows), 20).splitlines() == [
        "id  name",
        "1   first",
        "    short",
        "2   second",
        "    a sentence of",
        "    some words",
    ]


def test_a_name_is_cut_with_a_mark_and_a_word_of_a_sentence_never() -> None:
    rows = [("1", "a-very-long-name", "see /a/path/that/is/long/and/whole now")]
    assert shown(lambda: FittedTable(COLUMNS, rows), 16).splitlines() == [
        "id  name",
        "1   a-very-long…",
        "    see",
        "    /a/path/that/is/long/and/whole",
        "    now",
    ]


def test_wide_characters_are_counted_as_terminals_show_them() -> None:
    rows = [("1", "\u4e2d\u6587\u540d\u5b57\u5f88\u957f", "")]
    (_, line) = shown(lambda: FittedTable(COLUMNS, rows), 12).splitlines()
    assert cell_len(line) <= 12
    assert line.endswith("…")


def test_a_row_cannot_be_broken_by_what_is_in_it() -> None:
    rows = [("1", "a\nb\x1b[31m", "one\ntwo\x07")]
    assert shown(lambda: FittedTable(COLUMNS, rows), 60).splitlines() == [
        "id  name          why",
        r"1   a\nb\x1b[31m  one",
        r"                  two\x07",
    ]


def test_details_wrap_sentences_between_words_and_never_what_is_copied() -> None:
    rows = [("path", Exact("/p" * 30)), ("why", "one two three four five six"), ("none", None)]
    assert shown(lambda: Details(rows), 26).splitlines() == [
        "path  " + "/p" * 30,
        "why   one two three four",
        "      five six",
    ]
    styled = shown(lambda: Details([("state", Text("RUNNING", "cyan"))]), 26)
    assert styled == "state  RUNNING\n"


def test_a_terminal_of_no_columns_is_written_to_as_if_it_had_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert Terminal().width == 80
