"""What the units under one root share in order to communicate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_core.comm.lanes import Lanes
    from fsdp_core.comm.ledger import CollectiveLedger


@dataclass(frozen=True)
class CommLink:
    """Where collectives are placed and counted.

    Attributes:
        lanes: Orders device work.
        ledger: Numbers collectives per process group.
    """

    lanes: Lanes
    ledger: CollectiveLedger
