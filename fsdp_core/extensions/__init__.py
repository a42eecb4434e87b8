"""How tensors of other kinds are chunked, gathered and described: the 2D extension system."""

from __future__ import annotations
