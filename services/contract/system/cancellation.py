"""A task that was told to end, ends: also where a library below it passed over the cancellation.

redis-py waits for its writes with ``asyncio.wait_for``, which on Python 3.11 loses a cancellation
that comes in the moment in which what it waits for is done. Loops that live on such calls ask here
in each round; else their owner would wait for them forever.
"""

import asyncio


def end_if_told() -> None:
    """Go on, unless this task was told to end.

    Raises:
        CancelledError: It was; the task itself still knows.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
