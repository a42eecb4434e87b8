"""The option ``--code``: a folder that is uploaded for a job."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshloom.client import RestClient as Client
from services.cli import figures
from services.cli.terminal import errors
from services.contract.words.control_characters import one_line

Code = Annotated[
    Path | None,
    typer.Option(
        "--code",
        metavar="DIR",
        help="Upload this folder, without what .gitignore lists, for the job to import from first.",
    ),
]


def with_code(client: Client, spec: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """The spec that names the code in a folder, which is uploaded unless it is known; or as it is."""
    if folder is None:
        return spec
    # Not at the top: only who uploads code waits for what reads .gitignore files and settings.
    from services.cli.code_folder import pack_folder  # noqa: PLC0415
    from services.cli.settings import CliSettings  # noqa: PLC0415

    body = pack_folder(folder, CliSettings().max_code_mib)
    code, is_new = client.upload_code(body)
    size = figures.size(code.bytes)
    verb = "uploaded" if is_new else "known already:"
    errors.print(f"{verb} {code.files} files of {one_line(str(folder))}, {size}, as {code.digest}")
    return {**spec, "code": code.digest}
