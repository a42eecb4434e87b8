"""The engine's rank processes serve these tests too."""

from __future__ import annotations

from tests.engine.conftest import gangs

__all__ = ["gangs"]
