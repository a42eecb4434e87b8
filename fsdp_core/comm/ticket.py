"""A collective in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_core.comm.desync import wait_in_step
from fsdp_core.errors import TicketError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    import torch.distributed as dist


class Ticket:
    """Owns a collective's work object and every buffer it reads or writes.

    While the ticket lives, the allocator cannot hand those buffers to anyone else. `wait`
    yields the result once and lets go of everything.
    """

    def __init__(
        self,
        work: dist.Work | None,
        result: torch.Tensor,
        *,
        inputs: tuple[torch.Tensor, ...] = (),
        group: dist.ProcessGroup | None = None,
        on_complete: Callable[[], None],
    ) -> None:
        """Takes over a collective that was started.

        Args:
            work: None if the result is there.
            result: What `wait` returns.
            inputs: What the collective reads besides.
            group: In which it runs, if ranks could fall out of step in it.
            on_complete: Called when it was waited for.
        """
        self._work = work
        self._group = group
        self._on_complete = on_complete
        self._held: tuple[torch.Tensor, ...] = (result, *inputs)

    def wait(self) -> torch.Tensor:
        """Waits for the collective and returns its result.

        On a host backend this blocks. On an accelerator it orders the current stream after the
        collective and returns at once; buffers that were allocated in another stream's pool
        must then not be reused before that stream is ordered after this one.

        Raises:
            TicketError: The result was taken before.
            DesyncError: Other ranks have started another collective.
        """
        if not self._held:
            raise TicketError("This collective was waited for before; its buffers were let go.")
        held, self._held = self._held, ()
        work, self._work = self._work, None
        if work is not None:
            wait_in_step(work, self._group, held[0].device)
        self._on_complete()
        return held[0]
