"""``meshloom plan``: what a job will need, before anything is allocated."""

from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, Final

import typer
from tenacity import Retrying, retry_if_result, wait_fixed

from meshloom.client import RestClient as Client
from services.cli.connect import PATIENCE_S, WATCHING_PATIENCE_S, connect
from services.cli.output import answers, as_data
from services.cli.plan_tables import plan_parts, plans_table
from services.cli.references import plan_id_of
from services.cli.spec_file import judged, read_text
from services.cli.terminal import console, errors
from services.cli.tracebacks import own_frames
from services.cli.uploading import Code, with_code
from services.contract.api.plan_views import PlanView
from services.contract.words.states import PlanState

_EXIT_FAILED: Final = 1
_EXIT_INFEASIBLE: Final = 3
_LOOK_EVERY_S: Final = 0.5


@answers
def plan(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A job spec in YAML; - reads standard input.")
    ],
    *,
    fresh: Annotated[bool, typer.Option("--fresh", help="Profile the model again.")] = False,
    code: Code = None,
) -> None:
    """Predict mesh, memory and step time of a job; allocates nothing.

    The exit code is 3 if the job does not fit, and 1 if no plan could be made.

    Examples:
      meshloom plan job.yaml

      meshloom plan job.yaml --code . -o json
    """
    source = read_text(file)
    with connect(WATCHING_PATIENCE_S) as client, judged(source):
        client.send("GET", "/version", patience_s=PATIENCE_S)  # nobody there is told at once
        made = planned(client, with_code(client, dict(source.spec), code), fresh=fresh)
    show(made)
    leave_unless_feasible(made)


@answers
def plans(
    plan: Annotated[
        str | None,
        typer.Argument(
            metavar="PLAN",
            help="One plan: its id or the beginning of one, a name, or 'last' for the newest.",
        ),
    ] = None,
    *,
    state: Annotated[
        PlanState | None,
        typer.Option(help="Only plans in this state.", case_sensitive=False, metavar="STATE"),
    ] = None,
    owner: Annotated[
        str | None, typer.Option(help="Only this person's plans.", metavar="NAME")
    ] = None,
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=200, metavar="N")] = 20,
) -> None:
    """List the plans of the last seven days, or show one.

    Examples:
      meshloom plans --state ready

      meshloom plans last
    """
    if plan is not None:
        with connect() as client:
            show(client.get_plan(plan_id_of(client, plan)))
        return
    given = {"state": state, "owner": owner}
    with connect() as client:
        page = client.plans(limit=limit, **{name: text for name, text in given.items() if text})
    if not as_data(page):
        console.print(plans_table(page))


def planned(client: Client, spec: dict[str, Any], *, fresh: bool = False) -> PlanView:
    """A plan that is READY or FAILED; waits while its model is profiled."""
    made = client.plan(spec, fresh=fresh)
    if made.state is not PlanState.PROBING:
        return made
    errors.print(f"{made.reason} …")
    # The controller ends the wait: a plan that nobody answers becomes FAILED.
    look = Retrying(
        retry=retry_if_result(lambda now: now.state is PlanState.PROBING),
        wait=wait_fixed(_LOOK_EVERY_S),
    )
    return look(client.get_plan, made.id)


def show(made: PlanView) -> None:
    """Print a plan."""
    if as_data(made):
        return
    for part in plan_parts(made):
        console.print(part)
    if made.failure is not None and made.failure.traceback:
        console.print(indent(own_frames(made.failure.traceback), "  "))


def leave_unless_feasible(made: PlanView) -> None:
    """End the command with a code that says what kind of plan it is."""
    if made.state is PlanState.FAILED:
        raise typer.Exit(_EXIT_FAILED)
    if not made.feasible:
        raise typer.Exit(_EXIT_INFEASIBLE)
