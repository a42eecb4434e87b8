"""Which entry points (``package.module:callable``) and servers a job may name, and whether it may bring code."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from services.contract.jobs.spec_parts import Factory
from services.contract.jobs.specs import JobSpec

ANY: Final = "*"


def is_entry_point(factory: str) -> bool:
    """Whether a factory's name says where it is imported from; else it is the short name of a built-in."""
    return ":" in factory or "." in factory


@dataclass(frozen=True)
class EntryPoints:
    """The allow-list. ``prefixes``: of dotted names; None: every entry point there is.

    Built-ins, which have short names, are always allowed. ``uploads``: whether jobs may run uploaded
    code; None: where every entry point is allowed. A package in an archive can have any name, so that
    no list says anything of a job that brings one. ``trackers``: servers of experiment trackers that jobs
    may name where not every entry point is allowed.
    """

    prefixes: tuple[str, ...] | None = None
    uploads: bool | None = None
    trackers: tuple[str, ...] = ()

    @property
    def take_uploads(self) -> bool:
        """Whether jobs may run uploaded code."""
        return self.prefixes is None if self.uploads is None else self.uploads

    def allows_of(self, spec: JobSpec, factory: str) -> bool:
        """Whether this job may name this: with uploaded code it may name whatever it brings."""
        return self.allows(factory) or (spec.code is not None and self.take_uploads)

    def allows(self, factory: str) -> bool:
        """Whether a job may name this: a prefix ends where a part of the name ends."""
        if not is_entry_point(factory) or self.prefixes is None:
            return True
        return any(
            factory == prefix or factory.startswith((f"{prefix}.", f"{prefix}:"))
            for prefix in self.prefixes
        )

    def allows_script_of(self, spec: JobSpec) -> bool:
        """Whether this job may run its script: a module by its dotted name, a file by its path's parts.

        ``examples`` allows the module ``examples.train`` and the script ``examples/train.py``. With
        uploaded code a job may run whatever it brings.
        """
        script = spec.entrypoint
        if script is None or self.prefixes is None or (spec.code is not None and self.take_uploads):
            return True
        named = (tuple(prefix.split(".")) for prefix in self.prefixes)
        return any(script.parts[: len(prefix)] == prefix for prefix in named)

    def allows_tracker_of(self, spec: JobSpec, server: str) -> bool:
        """Whether this job's ranks may send metrics, and the secrets that it names for them, to this server.

        Code of a user's own could do so by itself; a job without any could not.
        """
        if self.prefixes is None or (spec.code is not None and self.take_uploads):
            return True
        return ANY in self.trackers or server.rstrip("/") in self.trackers


def entry_points(
    listed: Iterable[str] | None,
    *,
    otherwise_any: bool,
    uploads: bool | None = None,
    trackers: Iterable[str] = (),
) -> EntryPoints:
    """The allow-list from a setting.

    Args:
        listed: The prefixes; ``*`` allows every one; None: the setting is not made.
        otherwise_any: What holds then: everything, or nothing but built-ins.
        uploads: Whether jobs may run uploaded code; None: where every entry point is allowed.
        trackers: Servers that jobs may name where not every entry point is allowed; ``*``: all.
    """
    servers = tuple(server.strip().rstrip("/") for server in trackers if server.strip())
    if listed is None:
        return EntryPoints(None if otherwise_any else (), uploads, servers)
    prefixes = tuple(prefix.strip() for prefix in listed if prefix.strip())
    return EntryPoints(None if ANY in prefixes else prefixes, uploads, servers)


def factories_of(spec: JobSpec) -> Iterator[tuple[str, Factory]]:
    """The factories that a spec names, by field; a script names none."""
    if spec.entrypoint is not None:
        return
    named = {
        "trainable": spec.trainable,
        "model": spec.model,
        "data": spec.data,
        "loss": spec.loss,
        "optimizer": spec.optimizer,
        "schedule": spec.schedule,
        "evaluation.metrics": None if spec.evaluation is None else spec.evaluation.metrics,
    }
    yield from ((field, factory) for field, factory in named.items() if factory is not None)


def trackers_of(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """The servers of experiment trackers that a spec names, by field."""
    wandb, mlflow = (
        (None, None) if spec.metrics is None else (spec.metrics.wandb, spec.metrics.mlflow)
    )
    if wandb is not None and wandb.base_url is not None:
        yield "metrics.wandb.base_url", wandb.base_url
    if mlflow is not None and mlflow.tracking_uri is not None:
        yield "metrics.mlflow.tracking_uri", mlflow.tracking_uri
