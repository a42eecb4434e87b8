"""Which group has charge of a parameter that several units share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from fsdp_core.param.fsdp_param import FSDPParam
    from fsdp_core.param.param_group import FSDPParamGroup

_ATTRIBUTE = "_fsdp_core_charge"


@dataclass(frozen=True)
class Charge:
    """Who has charge of a parameter.

    It hangs on the parameter itself: a weak reference would forbid PyTorch to swap the tensor,
    and an identity could be another tensor's later. A pickled parameter is in nobody's charge.

    Attributes:
        param: The parameter, sharded.
        group: With which it communicates.
    """

    param: FSDPParam
    group: FSDPParamGroup

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def claim(original: nn.Parameter, charge: Charge) -> None:
    """Notes who has charge of what was `original`.

    That lives on where it hangs in modules that no unit has taken yet; and users may tie the
    sharded parameter to further places.
    """
    for known in (original, charge.param.sharded_param):
        known.__dict__[_ATTRIBUTE] = charge


def charge_of(parameter: nn.Parameter) -> Charge | None:
    """Who has charge of a parameter found on a module, if a unit has taken it before."""
    found: Charge | None = parameter.__dict__.get(_ATTRIBUTE)
    return found
