"""``meshloom tokens`` and ``meshloom audit``: who may ask, and who asked."""

import re
import sys
from typing import Annotated, Final

import typer
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from services.cli.connect import connect
from services.cli.errors import CliError
from services.cli.tables import age
from services.cli.terminal import console, errors, one_line
from services.contract.api.access import AuditPage, Scope, TokenList, TokenRequest
from services.contract.words.ids import TokenId

_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])")
_TOKEN_ID: Final = TypeAdapter(TokenId)

tokens = typer.Typer(help="Make, list and revoke bearer tokens.", no_args_is_help=True)


@tokens.command()
def create(
    subject: Annotated[str, typer.Argument(help="Who will hold it: the owner of what it submits.")],
    *,
    scope: Annotated[Scope, typer.Option(help="Permission scope.")] = Scope.VIEWER,
    label: Annotated[str, typer.Option(help="Free-text label.")] = "",
    expires: Annotated[
        str | None, typer.Option(help="How long it lives: 90s, 30m, 12h, 30d; else forever.")
    ] = None,
) -> None:
    """Make a token and print it: this is the only time that it is shown."""
    wanted = TokenRequest(
        subject=subject,
        scope=scope,
        label=label,
        expires_in_s=None if expires is None else _seconds(expires),
    )
    with connect() as client:
        made = client.create_token(wanted)
    errors.print(f"{made.id}: {made.scope} for {made.subject}; it is shown this once")
    # Alone on its stream, so that a script can take it.
    sys.stdout.write(f"{made.token}\n")


@tokens.command()
def ls() -> None:
    """List the tokens, without their secrets."""
    with connect() as client:
        console.print(tokens_table(client.tokens()))


@tokens.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="TOKEN_ID", help="As `tokens ls` shows it.")],
) -> None:
    """Revoke a token."""
    try:
        token_id = _TOKEN_ID.validate_python(token)
    except ValidationError:
        # Not echoed: it may be the token itself.
        raise CliError("this is not a token id; `meshloom tokens ls` lists them") from None
    with connect() as client:
        client.revoke_token(token_id)
    console.print(f"{token_id} is revoked")


def audit(
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=1000)] = 50,
) -> None:
    """List who changed what and who was refused, newest first."""
    with connect() as client:
        console.print(audit_table(client.audit(limit=limit)))


def tokens_table(page: TokenList) -> Table:
    """One row a token, oldest first."""
    table = _table("token", "subject", "scope", "label", "age", "expires", "made by")
    for token in page.items:
        expires = "never" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d %H:%M} UTC"
        table.add_row(
            token.id,
            token.subject,
            token.scope,
            token.label,
            age(token.created_at),
            "expired" if token.expired else expires,
            token.created_by,
        )
    return table


def audit_table(page: AuditPage) -> Table:
    """One row a request, newest first."""
    table = _table("time (UTC)", "who", "outcome", "request", "request id")
    for entry in page.items:
        more = f"; {entry.left_out} more left out" if entry.left_out else ""
        table.add_row(
            f"{entry.at:%Y-%m-%d %H:%M:%S}",
            entry.actor or "(nobody known)",
            f"{entry.outcome} ({entry.status}){more}",
            one_line(f"{entry.method} {entry.path}"),
            entry.request_id,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold dim", pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column in {"token", "time (UTC)"})
    return table


def _seconds(text: str) -> int:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise CliError(f"--expires is a number and one of s, m, h, d, such as 30d; not {text!r}")
    return int(found.group(1)) * _SECONDS[found.group(2)]
