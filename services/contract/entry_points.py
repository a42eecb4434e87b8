"""Which entry points (``package.module:callable``) a job may name."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from services.contract.scripts import EntryPoint
from services.contract.specs import Factory, JobSpec

ANY: Final = "*"


@dataclass(frozen=True)
class EntryPoints:
    """The allow-list. ``prefixes``: of dotted names; None: every entry point there is.

    Built-ins, which have short names, are always allowed.
    """

    prefixes: tuple[str, ...] | None = None

    def allows(self, factory: str) -> bool:
        """Whether a job may name this: a prefix ends where a part of the name ends."""
        if ":" not in factory or self.prefixes is None:
            return True
        return any(
            factory == prefix or factory.startswith((f"{prefix}.", f"{prefix}:"))
            for prefix in self.prefixes
        )

    def allows_script(self, entrypoint: EntryPoint) -> bool:
        """Whether a job may run this: a module as a factory in it, a script by its path's parts.

        ``examples`` allows the module ``examples.train`` and the script ``examples/train.py``.
        """
        if self.prefixes is None:
            return True
        named = (tuple(prefix.split(".")) for prefix in self.prefixes)
        return any(entrypoint.parts[: len(prefix)] == prefix for prefix in named)


def entry_points(listed: Iterable[str] | None, *, otherwise_any: bool) -> EntryPoints:
    """The allow-list from a setting.

    Args:
        listed: The prefixes; ``*`` allows every one; None: the setting is not made.
        otherwise_any: What holds then: everything, or nothing but built-ins.
    """
    if listed is None:
        return EntryPoints(None if otherwise_any else ())
    prefixes = tuple(prefix.strip() for prefix in listed if prefix.strip())
    return EntryPoints(None if ANY in prefixes else prefixes)


def factories_of(spec: JobSpec) -> Iterator[tuple[str, Factory]]:
    """The factories that a spec names, by field; a script names none."""
    if spec.entrypoint is not None:
        return
    yield "model", spec.model
    yield "data", spec.data
    if spec.loss is not None:
        yield "loss", spec.loss
    yield "optimizer", spec.optimizer
    yield "schedule", spec.schedule
