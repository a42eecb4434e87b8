"""``meshloom plan``: what a job will need, before anything is allocated."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import TypeAdapter, ValidationError
from tenacity import Retrying, retry_if_result, wait_fixed

from meshloom.client import RestClient as Client
from services.cli.code_folder import with_code
from services.cli.connect import WATCHING_PATIENCE_S, connect
from services.cli.errors import CliError
from services.cli.plan_tables import plan_parts, plans_table
from services.cli.spec_file import read_spec
from services.cli.terminal import console, errors, print_json
from services.contract.api.plan_views import PlanView
from services.contract.words.ids import PlanId
from services.contract.words.states import PlanState

_EXIT_FAILED: Final = 1
_EXIT_INFEASIBLE: Final = 3
_LOOK_EVERY_S: Final = 0.5
Code = Annotated[
    Path | None,
    typer.Option(
        "--code",
        metavar="DIR",
        help="Upload this folder, without what .gitignore lists, for the job to import from first.",
    ),
]
_PLAN_ID: Final = TypeAdapter(PlanId)


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A job spec in YAML.")],
    *,
    json: Annotated[bool, typer.Option("--json", help="The plan as the API answers it.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Profile the model again.")] = False,
    code: Code = None,
) -> None:
    """Say what the job in FILE will need, and whether it fits. Exit code 3: it does not."""
    spec = read_spec(file)
    with connect(WATCHING_PATIENCE_S) as client:
        made = planned(client, with_code(client, spec, code), fresh=fresh)
    if json:
        print_json(made)
    else:
        show(made)
    leave_unless_feasible(made)


def plans(
    plan: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="One plan's id, to see all of it.")
    ] = None,
    *,
    state: Annotated[
        PlanState | None, typer.Option(help="Only plans in this state.", case_sensitive=False)
    ] = None,
    owner: Annotated[str | None, typer.Option(help="Only this person's plans.")] = None,
    limit: Annotated[int, typer.Option(help="How many.", min=1, max=200)] = 20,
) -> None:
    """List the plans of the last seven days, the newest first, or show one."""
    if plan is not None:
        with connect() as client:
            show(client.get_plan(_plan_id(plan)))
        return
    given = {"state": state, "owner": owner}
    with connect() as client:
        page = client.plans(limit=limit, **{name: text for name, text in given.items() if text})
    console.print(plans_table(page))


def _plan_id(text: str) -> str:
    try:
        return _PLAN_ID.validate_python(text)
    except ValidationError:
        raise CliError(f"{text!r} is no plan id; `meshloom plans` lists them") from None


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
    for part in plan_parts(made):
        console.print(part)
    if made.failure is not None and made.failure.traceback:
        console.print(made.failure.traceback)


def leave_unless_feasible(made: PlanView) -> None:
    """End the command with a code that says what kind of plan it is."""
    if made.state is PlanState.FAILED:
        raise typer.Exit(_EXIT_FAILED)
    if not made.feasible:
        raise typer.Exit(_EXIT_INFEASIBLE)
