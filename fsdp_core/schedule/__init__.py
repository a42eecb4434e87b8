"""In which order units communicate, as arithmetic on unit indices. Imports no torch."""

from __future__ import annotations

from fsdp_core.schedule.backward_order import BackwardOrder
from fsdp_core.schedule.forward_order import ForwardOrder
from fsdp_core.schedule.window import InFlightWindow

__all__ = ["BackwardOrder", "ForwardOrder", "InFlightWindow"]
