"""What a spec says of a script: which one runs, and what it then does not say.

A script trains in a loop of its own. So the fields that only our loop reads are left out; readers
of a spec find in their place what no job of our loop has.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticCustomError

UNTOLD_STEPS: Final = 1_000_000_000
"""The ``train.steps`` of a script that does not say how many it makes: more than there can be."""
_OF_THE_LOOP: Final = "of_the_loop"
_BESIDE_A_SCRIPT: Final = frozenset(
    {
        "name",
        "entrypoint",
        "code",
        "train",
        "resources",
        "mesh",
        "checkpoint",
        "faults",
        "metrics",
        "priority",
        "labels",
    }
)
_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
_FILE: Final = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"

ScriptPath = Annotated[str, StringConstraints(pattern=rf"^({_FILE}/)*{_FILE}\.py$", max_length=255)]
ModuleName = Annotated[str, StringConstraints(pattern=rf"^{_NAME}(\.{_NAME})*$", max_length=200)]
Argument = Annotated[str, StringConstraints(max_length=8_192)]


class EntryPoint(BaseModel):
    """A script that runs in each rank as torchrun would run it; either ``script`` or ``module``.

    ``script`` is a path below the job's uploaded code or below a folder of ``MESHLOOM_USER_PATH``,
    without ``..``; ``module`` is a dotted name, as for ``python -m``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    script: ScriptPath | None = Field(
        default=None,
        description="Path of the script, below the uploaded code or a folder of MESHLOOM_USER_PATH.",
    )
    module: ModuleName | None = Field(
        default=None, description="A dotted module name, as for `python -m`."
    )
    args: tuple[Argument, ...] = Field(
        default=(), max_length=1_024, description="Command-line arguments of the script or module."
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.script is None) == (self.module is None):
            raise ValueError("give either script (a path) or module (a dotted name)")
        return self

    @property
    def what(self) -> str:
        """The script or the module, as people call it."""
        return self.script or self.module or ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of its dotted name; of a path, its folders and its name without ``.py``."""
        if self.script is not None:
            return tuple(self.script.removesuffix(".py").split("/"))
        return tuple((self.module or "").split("."))


def completed(given: object) -> object:
    """A spec as it was given, with what a script leaves out."""
    if not isinstance(given, Mapping) or given.get("entrypoint") is None:
        return given
    filled = dict(given)
    train = filled.get("train")
    if train is None:
        filled["train"] = {"steps": UNTOLD_STEPS}
    elif isinstance(train, Mapping) and train.get("steps") is None:
        filled["train"] = {**train, "steps": UNTOLD_STEPS}
    return filled


def for_a_loop_alone(spec: BaseModel) -> None:
    """Refuses what a spec with an entry point says to our loop.

    Raises:
        ValidationError: It says something; each field at its own place.
    """
    faults = [
        InitErrorDetails(type=_fault(place), loc=place, input=None) for place in _said_to_it(spec)
    ]
    if faults:
        raise ValidationError.from_exception_data("entrypoint", faults)


def schema_of_both(schema: dict[str, Any]) -> None:
    """Says in the JSON schema of a spec that what a script leaves out is not required of it."""
    schema.pop("required", None)


def _said_to_it(spec: BaseModel) -> Iterator[tuple[str, ...]]:
    for name, field in type(spec).model_fields.items():
        value = getattr(spec, name)
        if name == "train":
            yield from (
                (name, inner)
                for inner, about in type(value).model_fields.items()
                if inner != "steps" and getattr(value, inner) != about.get_default()
            )
        elif name not in _BESIDE_A_SCRIPT and not _is_unsaid(name, value, field):
            yield (name,)


def _is_unsaid(name: str, value: object, field: FieldInfo) -> bool:
    if name == "plan":
        return value in ("auto", "default")
    return bool(value == field.get_default(call_default_factory=True))


def _fault(place: tuple[str, ...]) -> Any:  # noqa: ANN401 (a literal or an error, for pydantic)
    name = ".".join(place)
    return PydanticCustomError(
        _OF_THE_LOOP,
        f"{name} is read only by Meshloom's loop; a script does this itself: leave it out",
    )
