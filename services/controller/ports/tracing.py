"""Who is told of requests and looks while they go on, so that they become spans of traces."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol


class Tracing(Protocol):
    """Traces; where none are wanted there is no such object, and nothing is called."""

    def request(
        self, method: str, headers: dict[str, str]
    ) -> AbstractContextManager[Callable[[str, int, str], None]]:
        """Within, a request is answered; the function takes its route, status and id."""
        ...

    def looking(self) -> AbstractContextManager[None]:
        """Within, the reconciler looks at all jobs."""
        ...
