"""How commands name a job: by its id, or as the newest one."""

from typing import Annotated, Final

import typer
from pydantic import TypeAdapter, ValidationError

from meshloom.client import RestClient as Client
from services.cli.errors import CliError
from services.contract.words.ids import JobId

_JOB_ID: Final = TypeAdapter(JobId)

Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, or 'last' for the newest.")]


def resolve(client: Client, job: str) -> str:
    """The id of a job that a command names.

    Raises:
        CliError: It is no id, or there is no job yet.
    """
    if job != "last":
        try:
            return _JOB_ID.validate_python(job)
        except ValidationError:
            raise CliError(f"{job!r} is not a job id; `meshloom ls` lists them") from None
    newest = client.jobs(limit=1).items
    if not newest:
        raise CliError("there is no job yet; submit one with `meshloom submit FILE`")
    return newest[0].id
