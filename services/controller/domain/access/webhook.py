"""A webhook, how its deliveries go, and what one delivery consists of."""

import base64
import hashlib
import hmac
import json
from typing import Any, Final
from urllib.parse import urlsplit

from services.contract.api.views import EventView
from services.contract.api.webhooks import WebhookFormat
from services.contract.words.control_characters import one_line
from services.controller.domain.record import Record

SECRET_BYTES: Final = 32
_SECRET_PREFIX: Final = "whsec_"  # noqa: S105 what all such secrets begin with
_SLACK_CHARACTERS: Final = 3_000


class Webhook(Record):
    """As it was registered. ``secret``: base64, as it was shown; it must be kept to sign."""

    id: str
    url: str
    kinds: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    format: WebhookFormat = "standard"
    owner: str | None = None
    created_by: str
    created_ms: int
    secret: str

    @property
    def shown_url(self) -> str:
        """Scheme, host and port: a path or a query may be a credential, as Slack's are."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        port = "" if parts.port is None else f":{parts.port}"
        return f"{parts.scheme}://{host}{port}/…"


class Deliveries(Record):
    """How far a webhook is. ``cursor``: the last event of the feed that is dealt with."""

    cursor: str
    delivered: int = 0
    dropped: int = 0
    delivered_ms: int | None = None
    last_error: str | None = None
    disabled: bool = False


def secret_text(randomness: bytes) -> str:
    """A secret as it is shown and kept."""
    return _SECRET_PREFIX + base64.b64encode(randomness).decode()


def message_id(webhook: Webhook, event: EventView) -> str:
    """The same each time that an event is sent to a webhook, so that receivers find repeated ones."""
    return f"msg_{webhook.id.removeprefix('webhook_')}_{event.id}"


def body_of(webhook: Webhook, event: EventView, job_name: str | None) -> bytes:
    """What is sent."""
    if webhook.format == "slack":
        return _json({"text": _slack_text(event, job_name)})
    return _json(
        {
            "type": event.kind,
            "timestamp": event.at.isoformat(),
            "data": {**event.model_dump(mode="json"), "job_name": job_name},
        }
    )


def headers_of(webhook: Webhook, message: str, body: bytes, now_s: int) -> dict[str, str]:
    """The headers of Standard Webhooks: id, time and signature (HMAC-SHA256) of both and the body.

    See https://www.standardwebhooks.com.
    """
    key = base64.b64decode(webhook.secret.removeprefix(_SECRET_PREFIX))
    signed = hmac.digest(key, f"{message}.{now_s}.".encode() + body, hashlib.sha256)
    return {
        "Content-Type": "application/json",
        "User-Agent": "meshloom-webhooks",
        "webhook-id": message,
        "webhook-timestamp": str(now_s),
        "webhook-signature": f"v1,{base64.b64encode(signed).decode()}",
    }


def _slack_text(event: EventView, job_name: str | None) -> str:
    name = _escaped(job_name or event.job_id)
    # What follows a line break could pose as another event.
    message = _escaped(one_line(event.message))[:_SLACK_CHARACTERS]
    return f"*{name}* {event.kind} (`{event.job_id}`)\n{message}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
