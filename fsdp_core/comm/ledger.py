"""Counts collectives, so that whoever is behind within a group can be named."""

from __future__ import annotations

from collections import Counter
from typing import Protocol


class CollectiveListener(Protocol):
    """Told of every collective; must return at once and must not raise."""

    def on_issue(self, group: str, sequence: int) -> None:
        """Collective number `sequence` (from 1) of `group` was handed to the backend."""

    def on_complete(self, group: str, sequence: int) -> None:
        """The host has waited for it. On an accelerator the host only orders streams."""


class CollectiveLedger:
    """Numbers the collectives of each process group, from 1, equally on all its ranks."""

    def __init__(self, listener: CollectiveListener) -> None:
        self._listener = listener
        self._issued: Counter[str] = Counter()

    def issue(self, group: str) -> int:
        """Notes one more collective of `group` and returns its number."""
        self._issued[group] += 1
        sequence = self._issued[group]
        self._listener.on_issue(group, sequence)
        return sequence

    def complete(self, group: str, sequence: int) -> None:
        """Notes that collective `sequence` of `group` was waited for."""
        self._listener.on_complete(group, sequence)
