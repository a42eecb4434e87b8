"""The client that people use in programs and notebooks."""

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from meshloom.client.settings import ClientSettings
from meshloom.client.synchronous.checkpoints import Checkpoints
from meshloom.client.synchronous.jobs import Jobs
from meshloom.client.synchronous.rest import RestClient
from services.contract.api.plan_views import PlanSummary, PlanView
from services.contract.api.queue import CapacityView, DrainRequest, PoolView, QueueEntry
from services.contract.api.views import EventView, NodeView, Version
from services.contract.api.webhooks import (
    WebhookCreated,
    WebhookFormat,
    WebhookRequest,
    WebhookView,
)


class Plans:
    """What jobs will need: ``client.plans``."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def make(self, spec: Mapping[str, Any], *, fresh: bool = False) -> PlanView:
        """Have a plan made for a spec; it may still be PROBING. ``fresh``: profile again."""
        return self._rest.plan(spec, fresh=fresh)

    def get(self, plan_id: str) -> PlanView:
        """One plan."""
        return self._rest.get_plan(plan_id)

    def list(self, *, limit: int = 50, **filters: str) -> Sequence[PlanSummary]:
        """Plans, the newest first; ``filters`` are ``state`` and ``owner``."""
        return (self._rest.plans(limit=limit, **filters)).items


class Nodes:
    """Machines: ``client.nodes``."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def list(self) -> Sequence[NodeView]:
        """All nodes that ever joined."""
        return (self._rest.nodes()).items

    def get(self, node_id: str) -> NodeView:
        """One node."""
        return self._rest.node(node_id)

    def drain(self, node_id: str, *, grace_s: float = 60.0) -> NodeView:
        """Have its gangs checkpoint and move, and place no more there.

        Args:
            node_id: The node.
            grace_s: Seconds until ranks that still run are killed.
        """
        return self._rest.drain(node_id, DrainRequest(grace_s=grace_s))

    def undrain(self, node_id: str) -> NodeView:
        """Have gangs placed there again."""
        return self._rest.undrain(node_id)

    def forget(self, node_id: str) -> None:
        """Delete the record of a lost node."""
        self._rest.forget(node_id)


class Queue:
    """Jobs that wait for slots, free slots, and pools: ``client.queue``."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def list(self) -> Sequence[QueueEntry]:
        """Who waits, the next one first, and why."""
        return (self._rest.queue()).items

    def capacity(self) -> CapacityView:
        """What is taken and what is free, node by node."""
        return self._rest.capacity()

    def pools(self) -> Sequence[PoolView]:
        """The pools that bring nodes when a job fits no free one, and what they have brought."""
        return (self._rest.pools()).items


class Events:
    """What happens to all jobs: ``client.events``."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def list(
        self,
        *,
        after: str | None = None,
        limit: int = 200,
        kind: Sequence[str] = (),
        owner: str | None = None,
        label: Sequence[str] = (),
    ) -> Sequence[EventView]:
        """Events, oldest first.

        Args:
            after: Begin behind the event of this id; None: with the oldest that is kept.
            limit: So many at most, up to 1000.
            kind: Of any of these kinds; ``checkpoint.*`` means all that begin so.
            owner: Of this subject's jobs only.
            label: Of jobs with all of these labels, each ``key`` or ``key=value``.
        """
        page = self._rest.all_events(
            limit=limit, cursor=after, kind=[*kind], owner=owner, label=[*label]
        )
        return page.items

    def follow(
        self,
        *,
        after: str | None = None,
        replay: bool = False,
        kind: Sequence[str] = (),
        owner: str | None = None,
        label: Sequence[str] = (),
    ) -> Iterator[EventView]:
        """Events as they come, without end: from now on, behind ``after``, or all that are kept.

        To miss none between two runs of a program, keep the id of the last event and pass it as
        ``after``. ``replay`` begins with the oldest event that is kept; else as of ``list``.
        """
        filters: dict[str, str | list[str]] = {"kind": [*kind], "label": [*label]}
        if replay:
            filters["replay"] = "true"
        if owner is not None:
            filters["owner"] = owner
        for event in self._rest.follow_all_events(last_id=after, **filters):
            yield event


class Webhooks:
    """Where events are sent: ``client.webhooks``."""

    def __init__(self, rest: RestClient) -> None:
        self._rest = rest

    def create(
        self,
        url: str,
        *,
        kinds: Sequence[str] = (),
        labels: Sequence[str] = (),
        format: WebhookFormat = "standard",  # noqa: A002 as in the API
    ) -> WebhookCreated:
        """Have events sent to a URL from now on; ``secret`` of the answer is shown only there.

        Args:
            url: Of the receiver; https, at a public address.
            kinds: Any of these, ``checkpoint.*`` means all that begin so; none: all.
            labels: Of jobs with all of these, each ``key`` or ``key=value``.
            format: ``standard``, or ``slack`` for an incoming webhook of Slack.
        """
        body = {"url": url, "kinds": kinds, "labels": labels, "format": format}
        return self._rest.create_webhook(WebhookRequest.model_validate(body))

    def list(self) -> Sequence[WebhookView]:
        """One's own, for an operator all, and how their deliveries go."""
        return (self._rest.webhooks()).items

    def delete(self, webhook_id: str) -> None:
        """Remove one."""
        self._rest.remove_webhook(webhook_id)


class Client:
    """A client of one controller.

    Args:
        base_url: The controller's root; None: ``MESHLOOM_URL``, else this host and ``MESHLOOM_PORT``.
        token: A bearer token; None: ``MESHLOOM_TOKEN``, if it is set and ``base_url`` is not given.
        timeout_s: Seconds that one answer may take.
        patience_s: Seconds for which a controller that does not answer, or that asks to wait
            (429, 503), is asked again.

    Every method raises ``UnreachableError`` if nobody answers, and ``RefusedError`` with the
    problem if the controller refuses.

    Attributes:
        rest: The same API, one method an endpoint.
        jobs: Submit, get and list jobs.
        checkpoints: Get checkpoints.
        plans: Make, get and list plans.
        nodes: Get, list and drain nodes.
        queue: Who waits, and what room there is.
        events: What happens to all jobs.
        webhooks: Where events are sent.
    """

    def __init__(
        self,
        base_url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = 15.0,
        patience_s: float = 10.0,
    ) -> None:
        if base_url is None:
            settings = ClientSettings.from_environment()
            # The environment's token is for the environment's controller, and goes nowhere else.
            base_url, token = settings.base_url, token or settings.token
        self.rest = RestClient(base_url, token, timeout_s=timeout_s, patience_s=patience_s)
        self.jobs = Jobs(self.rest)
        self.checkpoints = Checkpoints(self.rest)
        self.plans = Plans(self.rest)
        self.nodes = Nodes(self.rest)
        self.queue = Queue(self.rest)
        self.events = Events(self.rest)
        self.webhooks = Webhooks(self.rest)

    def __repr__(self) -> str:
        return f"<Meshloom client of {self.rest.base_url}>"

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close its connections."""
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self.rest.close()

    def version(self) -> Version:
        """Which build answers."""
        return self.rest.version()
