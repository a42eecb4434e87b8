"""Which group has charge of a parameter that several units share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_core.param.attachment import Attachment, attach, attached

if TYPE_CHECKING:
    from torch import nn

    from fsdp_core.param.fsdp_param import FSDPParam
    from fsdp_core.param.param_group import FSDPParamGroup


@dataclass(frozen=True)
class Charge(Attachment):
    """Who has charge of a parameter.

    Attributes:
        param: The parameter, sharded.
        group: With which it communicates.
    """

    param: FSDPParam
    group: FSDPParamGroup


def claim(original: nn.Parameter, charge: Charge) -> None:
    """Notes who has charge of what was `original`.

    That lives on where it hangs in modules that no unit has taken yet; and users may tie the
    sharded parameter to further places.
    """
    for known in (original, charge.param.sharded_param):
        attach(known, charge)


def charge_of(parameter: nn.Parameter) -> Charge | None:
    """Who has charge of a parameter found on a module, if a unit has taken it before."""
    return attached(parameter, Charge)
