"""What each route asks of a token: data beside the route, checked before the route runs.

A route of ``/v1`` carries exactly one of these among its ``dependencies``::

    @router.get("/queue", dependencies=[READS])
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from fastapi import APIRouter, Request, Security
from fastapi.params import Security as SecurityParameter
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from services.contract.api.access import Scope
from services.contract.words.ids import job_of_checkpoint
from services.controller.api.context import WithPorts, WithPrincipal
from services.controller.domain.access.token import Principal
from services.controller.domain.errors import ForbiddenError
from services.controller.ports.coordination import Ports
from services.controller.use_cases.access import check_owner

Claim = Callable[[Request, Ports, Principal], Awaitable[bool]]

# It only documents: the guard has looked at the header before anything is routed.
_BEARER: Final = Security(
    HTTPBearer(auto_error=False, scheme_name="bearer", description="A token of `POST /v1/tokens`")
)


async def _owns_the_job(request: Request, ports: Ports, asks: Principal) -> bool:
    names = request.path_params
    job_id = names["job_id"] if "job_id" in names else job_of_checkpoint(names["checkpoint_id"])
    if asks.scope.includes(Scope.SUBMITTER):
        await check_owner(ports, job_id, asks)
        return True
    return False


async def _is_the_node(request: Request, _ports: Ports, asks: Principal) -> bool:
    return asks.scope is Scope.AGENT and asks.subject == request.path_params["node_id"]


class _Check:
    """The dependency behind one requirement.

    Args:
        wanted: The scope that opens the route.
        claim: What else must hold, or opens it too; see ``needs``.
    """

    def __init__(self, wanted: Scope, claim: Claim | None) -> None:
        self.wanted = wanted
        self._claim = claim

    async def __call__(
        self,
        request: Request,
        ports: WithPorts,
        asks: WithPrincipal,
        _shown: Any = _BEARER,  # noqa: ANN401 a parameter of FastAPI's
    ) -> None:
        """Raise ForbiddenError unless who asks may."""
        if self._claim is not None and await self._claim(request, ports, asks):
            return
        if not asks.scope.includes(self.wanted):
            raise ForbiddenError(
                f"this needs a token of scope {self.wanted}; the token of {asks.subject} has scope "
                f"{asks.scope}"
            )


def needs(wanted: Scope, claim: Claim | None = None) -> SecurityParameter:
    """A requirement for a route's ``dependencies``.

    Args:
        wanted: The scope, itself or included in a greater one.
        claim: Answers whether who asks may in any case; it may refuse by itself.
    """
    requirement: SecurityParameter = Security(_Check(wanted, claim), scopes=[wanted.value])
    return requirement


READS: Final = needs(Scope.VIEWER)
"""Looking."""
SUBMITS: Final = needs(Scope.SUBMITTER)
"""Making a job."""
OWNS_JOB: Final = needs(Scope.SUBMITTER, _owns_the_job)
"""Changing the job, or the checkpoint's job, that the path names: its owner, and operators."""
OPERATES: Final = needs(Scope.OPERATOR)
"""Nodes, tokens, the audit trail."""
READS_NODE: Final = needs(Scope.VIEWER, _is_the_node)
"""Looking at the node that the path names: its own agent may, too."""
OPERATES_NODE: Final = needs(Scope.OPERATOR, _is_the_node)
"""Changing the node that the path names: its own agent may, too."""


def scope_of(route: APIRoute) -> Scope | None:
    """The scope that a route wants; None if it says none, or several."""
    checks = [d.dependency for d in route.dependencies if isinstance(d.dependency, _Check)]
    return checks[0].wanted if len(checks) == 1 else None


def unscoped(router: APIRouter) -> Iterator[str]:
    """The routes that do not say which scope they want."""
    for route in router.routes:
        if not isinstance(route, APIRoute) or scope_of(route) is None:
            methods = ",".join(sorted(getattr(route, "methods", None) or ()))
            yield f"{methods} {getattr(route, 'path', route)}"
