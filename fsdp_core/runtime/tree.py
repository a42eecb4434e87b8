"""From lone units to the tree of one root."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from fsdp_core.errors import RootError
from fsdp_core.param import FSDPParam
from fsdp_core.runtime.root_context import RootContext, Unit

if TYPE_CHECKING:
    from torch import nn

    from fsdp_core.comm import CommContext
    from fsdp_core.runtime.observer import ObserverRelay


class Member(Unit, Protocol):
    """What a unit shows while the tree is formed."""

    @property
    def params(self) -> list[FSDPParam]:
        """All parameters of the unit."""

    context: RootContext
    """Its own until it joins a tree."""

    def settle(self) -> None:
        """Takes over what the user did since sharding, and checks that training can start."""

    def join(self, context: RootContext, index: int, fqn: str) -> None:
        """Becomes unit number `index` of the tree."""


def form_tree(
    modules: Sequence[nn.Module],
    members: Mapping[Member, Sequence[str]],
    comm: CommContext,
    relay: ObserverRelay,
) -> None:
    """Builds the context of a tree and has all its members join it.

    Args:
        modules: Of the unit that becomes the root.
        members: The units below, the root first, with the names of their modules, in pre-order.
        comm: Where the root communicates.
        relay: The root's observer.

    Raises:
        RootError: The root has several modules, or a unit below ran forward alone before.
        MetaParameterError: Parameters have no values yet.
        OffloadError: Slices are not on the host, where the offload policy wants them.
    """
    if len(modules) > 1:
        raise RootError(f"FSDP requires a single root module but got {tuple(modules)}")
    for unit, fqns in members.items():
        if not unit.context.is_solo:
            raise RootError(
                f"FSDP state has already been lazily initialized for {', '.join(fqns)}\n"
                "FSDP requires running forward through the root module first"
            )
    _name_from_root(modules[0], [param for unit in members for param in unit.params])
    for unit in members:
        unit.settle()
    context = RootContext(list(members), comm, relay, is_solo=False)
    for index, (unit, fqns) in enumerate(members.items()):
        unit.join(context, index, ", ".join(fqns))


def _name_from_root(root: nn.Module, params: Iterable[FSDPParam]) -> None:
    prefixes = {module: name for name, module in root.named_modules()}
    for param in params:
        module, local_name = param.slot.places[0]
        prefix = prefixes.get(module, "")
        param.fqn = f"{prefix}.{local_name}" if prefix else local_name
