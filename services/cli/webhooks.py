"""``meshloom webhooks``: where the controller sends events of jobs."""

import sys
from enum import StrEnum
from typing import Annotated

import typer

from services.cli.connect import connect
from services.cli.figures import short_age
from services.cli.layout import Column, Columns, FittedTable
from services.cli.lazy import Command, Group
from services.cli.output import answers, as_data
from services.cli.request_bodies import read_model
from services.cli.terminal import console, errors
from services.contract.api.webhooks import WebhookList, WebhookRequest, WebhookView
from services.contract.words.control_characters import harmless


class Shape(StrEnum):
    """What is sent."""

    STANDARD = "standard"
    SLACK = "slack"


webhooks = typer.Typer(
    cls=Group,
    help="Send events of jobs to a URL.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@webhooks.command(cls=Command)
@answers
def add(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The receiver: https, at a public address.")
    ],
    *,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="Only events of this kind, such as job.failed or 'checkpoint.*'; may be repeated.",
            metavar="KIND",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Only of jobs with this label; may be repeated: all of them.",
            metavar="KEY[=VALUE]",
        ),
    ] = None,
    shape: Annotated[
        Shape,
        typer.Option("--format", help="standard, or slack: a text for Slack.", metavar="NAME"),
    ] = Shape.STANDARD,
) -> None:
    """Add a webhook and print its secret: this is the only time that it is shown.

    The receiver checks with it that an event is the controller's.

    Example:
      meshloom webhooks add https://hooks.example.org/meshloom --kind job.failed --label team=vision
    """
    wanted = {"url": url, "kinds": kind or (), "labels": label or (), "format": shape.value}
    with connect() as client:
        made = client.create_webhook(read_model(WebhookRequest, wanted))
    if as_data(made):
        return
    errors.print(f"{made.id}: {made.url}; its secret is shown this once")
    # Alone on its stream, so that a script can take it.
    sys.stdout.write(f"{harmless(made.secret)}\n")


@webhooks.command(cls=Command)
@answers
def ls() -> None:
    """List webhooks, and how their deliveries go.

    Example:
      meshloom webhooks ls
    """
    with connect() as client:
        found = client.webhooks()
    if as_data(found):
        return
    console.print(webhooks_table(found) if found.items else "No webhooks")


@webhooks.command(cls=Command)
@answers
def remove(
    webhook: Annotated[
        str, typer.Argument(metavar="WEBHOOK_ID", help="As `webhooks ls` shows it.")
    ],
) -> None:
    """Remove a webhook.

    Example:
      meshloom webhooks remove webhook_01m80dqny75dcp2ta9620emyrc
    """
    with connect() as client:
        client.remove_webhook(webhook)
    if not as_data({"id": webhook, "removed": True}):
        console.print(f"{webhook} is removed")


def webhooks_table(page: WebhookList) -> FittedTable[WebhookView]:
    """One row a webhook, oldest first; below it what went wrong last."""
    columns: Columns[WebhookView] = (
        Column("webhook", lambda hook: hook.id),
        Column("to", lambda hook: hook.url, fit="cut"),
        Column("delivered", lambda hook: str(hook.delivered), drop=2),
        Column("last", _last, drop=1),
        Column("dropped", lambda hook: str(hook.dropped or ""), drop=3),
        Column("kinds", lambda hook: ", ".join(hook.kinds) or "all", drop=5, fit="cut"),
        Column("labels", lambda hook: ", ".join(hook.labels), drop=6, fit="cut"),
        Column("made by", lambda hook: hook.created_by, drop=7, fit="cut"),
        Column("format", lambda hook: hook.format, drop=8),
        Column("trouble", _trouble, fit="note"),
    )
    return FittedTable(columns, page.items)


def _last(hook: WebhookView) -> str:
    return "never" if hook.delivered_at is None else f"{short_age(hook.delivered_at)} ago"


def _trouble(hook: WebhookView) -> str:
    if hook.disabled:
        return "disabled: the receiver answered 410 Gone; remove it and add another"
    return "" if hook.last_error is None else f"the last try failed: {hook.last_error}"
