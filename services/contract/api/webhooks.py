"""Webhooks: where events of jobs are sent, as it travels."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AnyHttpUrl, BaseModel, ConfigDict, Field, StringConstraints, UrlConstraints

from services.contract.words.ids import WebhookId

WebhookFormat = Literal["standard", "slack"]
WebhookUrl = Annotated[AnyHttpUrl, UrlConstraints(max_length=2_000)]
EventKindPattern = Annotated[
    str, StringConstraints(pattern=r"^[a-z_]+\.([a-z_]+|\*)$", max_length=64)
]
LabelFilter = Annotated[str, StringConstraints(min_length=1, max_length=320)]


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, json_schema_serialization_defaults_required=True)


class WebhookRequest(_View):
    """Where to send which events.

    ``kinds``: any of these, `checkpoint.*` means all that begin so; none: all. ``labels``: of jobs with all
    of these, each `key=value` or `key`. ``format``: as Standard Webhooks describes, or a text for Slack.
    A submitter's webhook gets the events of the submitter's own jobs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: WebhookUrl
    kinds: Annotated[tuple[EventKindPattern, ...], Field(max_length=64)] = ()
    labels: Annotated[tuple[LabelFilter, ...], Field(max_length=16)] = ()
    format: WebhookFormat = "standard"


class WebhookView(_View):
    """A webhook and how its deliveries go. ``dropped``: events that were given up or trimmed."""

    id: WebhookId
    url: str = Field(description="scheme, host and port: what follows them may be a secret")
    kinds: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    format: WebhookFormat
    owner: str | None = Field(None, description="whose jobs' events it gets; null: everybody's")
    created_by: str
    created_at: datetime
    delivered: int = 0
    dropped: int = 0
    delivered_at: datetime | None = None
    last_error: str | None = Field(None, description="why the last try failed; null: it did not")
    disabled: bool = Field(default=False, description="the receiver answered 410 Gone")


class WebhookCreated(WebhookView):
    """A new webhook. ``secret`` signs what is sent; it is shown here and never again."""

    secret: str


class WebhookList(_View):
    """Webhooks, oldest first: all of them for operators, else one's own."""

    items: tuple[WebhookView, ...]
