"""Bodies of requests that are made of options."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.cli.errors import CliError
from services.contract.api.pointers import faults_of
from services.contract.words.problems import listed

_M = TypeVar("_M", bound=BaseModel)


def read_model(model: type[_M], value: Mapping[str, Any]) -> _M:
    """The body of a request from options.

    Raises:
        CliError: It is none; every fault on its line.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        faults = faults_of(error.errors(include_url=False), value, model)
        raise CliError(listed(faults)) from error
