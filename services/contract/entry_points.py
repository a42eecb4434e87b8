"""Which entry points (``package.module:callable``, or with dots alone) a job may name."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from services.contract.specs import Factory, JobSpec

ANY: Final = "*"


def is_entry_point(factory: str) -> bool:
    """Whether a factory's name says where it is imported from; else it is the short name of a built-in."""
    return ":" in factory or "." in factory


@dataclass(frozen=True)
class EntryPoints:
    """The allow-list. ``prefixes``: of dotted names; None: every entry point there is.

    Built-ins, which have short names, are always allowed.
    """

    prefixes: tuple[str, ...] | None = None

    def allows(self, factory: str) -> bool:
        """Whether a job may name this: a prefix ends where a part of the name ends."""
        if not is_entry_point(factory) or self.prefixes is None:
            return True
        return any(
            factory == prefix or factory.startswith((f"{prefix}.", f"{prefix}:"))
            for prefix in self.prefixes
        )


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
    """The factories that a spec names, by field."""
    named = {
        "trainable": spec.trainable,
        "model": spec.model,
        "data": spec.data,
        "loss": spec.loss,
        "optimizer": spec.optimizer,
        "schedule": spec.schedule,
    }
    yield from ((field, factory) for field, factory in named.items() if factory is not None)
