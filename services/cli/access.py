"""``meshloom tokens`` and ``meshloom audit``: who may ask, and who asked."""

import re
import sys
from typing import Annotated, Final

import typer
from pydantic import TypeAdapter, ValidationError

from services.cli.connect import connect
from services.cli.errors import CliError
from services.cli.figures import short_age
from services.cli.layout import Column, Columns, FittedTable
from services.cli.lazy import Command, Group
from services.cli.output import answers, as_data
from services.cli.terminal import console, errors
from services.contract.api.access import (
    AuditEntryView,
    AuditPage,
    Scope,
    TokenList,
    TokenRequest,
    TokenView,
)
from services.contract.words.control_characters import harmless, one_line
from services.contract.words.ids import TokenId

_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])")
_TOKEN_ID: Final = TypeAdapter(TokenId)

tokens = typer.Typer(
    cls=Group,
    help="Make, list and revoke access tokens.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@tokens.command(cls=Command)
@answers
def create(
    subject: Annotated[
        str, typer.Argument(metavar="SUBJECT", help="Who will hold it, and so own what it submits.")
    ],
    *,
    scope: Annotated[
        Scope, typer.Option(help="viewer, submitter, operator or agent.", metavar="SCOPE")
    ] = Scope.VIEWER,
    label: Annotated[
        str, typer.Option(help="Any text, such as what it is for.", metavar="TEXT")
    ] = "",
    expires: Annotated[
        str | None,
        typer.Option(help="How long it lives: 90s, 30m, 12h, 30d; else forever.", metavar="AGE"),
    ] = None,
) -> None:
    """Make a token and print it: this is the only time that it is shown.

    Example:
      meshloom tokens create alice --scope submitter --expires 30d
    """
    wanted = TokenRequest(
        subject=subject,
        scope=scope,
        label=label,
        expires_in_s=None if expires is None else _seconds(expires),
    )
    with connect() as client:
        made = client.create_token(wanted)
    if as_data(made):
        return
    errors.print(f"{made.id}: {made.scope} for {made.subject}; it is shown this once")
    # Alone on its stream, so that a script can take it.
    sys.stdout.write(f"{harmless(made.token)}\n")


@tokens.command(cls=Command)
@answers
def ls() -> None:
    """List the tokens, without their secrets.

    Example:
      meshloom tokens ls
    """
    with connect() as client:
        found = client.tokens()
    if not as_data(found):
        console.print(tokens_table(found))


@tokens.command(cls=Command)
@answers
def revoke(
    token: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As `tokens ls` shows it.")],
) -> None:
    """Revoke a token.

    Example:
      meshloom tokens revoke tok_01m80dqny75dcp2ta9620emyrc
    """
    try:
        token_id = _TOKEN_ID.validate_python(token)
    except ValidationError:
        # Not echoed: it may be the token itself.
        raise CliError("this is not a token id; `meshloom tokens ls` lists them") from None
    with connect() as client:
        client.revoke_token(token_id)
    if not as_data({"id": token_id, "revoked": True}):
        console.print(f"{token_id} is revoked")


@answers
def audit(
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=1000, metavar="N")] = 50,
) -> None:
    """List who changed what, and who was refused.

    The newest request is first.

    Example:
      meshloom audit --limit 20
    """
    with connect() as client:
        found = client.audit(limit=limit)
    if not as_data(found):
        console.print(audit_table(found))


def tokens_table(page: TokenList) -> FittedTable[TokenView]:
    """One row a token, oldest first."""
    columns: Columns[TokenView] = (
        Column("token", lambda token: token.id),
        Column("subject", lambda token: token.subject, fit="cut"),
        Column("scope", lambda token: token.scope),
        Column("expires", _expiry, drop=1),
        Column("age", lambda token: short_age(token.created_at), drop=3),
        Column("label", lambda token: token.label, drop=2, fit="cut", least=6),
        Column("made by", lambda token: token.created_by, drop=4, fit="cut"),
    )
    return FittedTable(columns, page.items)


def audit_table(page: AuditPage) -> FittedTable[AuditEntryView]:
    """One row a request, newest first."""
    columns: Columns[AuditEntryView] = (
        Column("time (UTC)", lambda entry: f"{entry.at:%Y-%m-%d %H:%M:%S}"),
        Column("who", lambda entry: entry.actor or "(unknown)", fit="cut"),
        Column("outcome", lambda entry: f"{entry.outcome} ({entry.status})"),
        Column("more like it", lambda entry: str(entry.left_out or ""), drop=2),
        Column("request id", lambda entry: entry.request_id, drop=1),
        Column("request", lambda entry: one_line(f"{entry.method} {entry.path}"), fit="note"),
    )
    return FittedTable(columns, page.items)


def _expiry(token: TokenView) -> str:
    if token.expired:
        return "expired"
    return "never" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d %H:%M} UTC"


def _seconds(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise CliError(f"--expires is a number and one of s, m, h, d, such as 30d; not {text!r}")
    return int(found.group(1)) * _SECONDS[found.group(2)]
