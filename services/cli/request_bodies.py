"""Bodies of requests that are made of options, or of a file."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.cli.errors import CliError, in_their_places
from services.contract.api.pointers import faults_of
from services.contract.words.problems import listed

if TYPE_CHECKING:
    from services.cli.spec_places import SpecText

_M = TypeVar("_M", bound=BaseModel)


def read_model(model: type[_M], value: Mapping[str, Any], source: "SpecText | None" = None) -> _M:
    """The body of a request from options; ``source``: the file that says it, for the lines of errors.

    Raises:
        CliError: It is none; every fault on its line.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = faults_of(error.errors(include_url=False), value, model)
        if source is not None:
            told = in_their_places(faults, source.where, source.mark, "patch")
            raise CliError(told) from error
        raise CliError(listed(faults)) from error
