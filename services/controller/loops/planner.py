"""The loop that has layouts chosen for jobs that leave them open."""

from services.controller.loops.store_retry import StoreRetry, Troubles
from services.controller.ports.coordination import Ports
from services.controller.use_cases.plan_jobs import Planner
from services.controller.use_cases.plans import Drawing


async def plan_jobs(
    ports: Ports, epoch: int, drawing: Drawing, troubles: Troubles | None = None
) -> None:
    """Plan until cancelled; apart from the reconciler, which must not wait until a search is done.

    Raises:
        DeposedError: The term is over.
    """
    planner = Planner(ports, epoch, drawing)
    retry = StoreRetry("planning", troubles=troubles)

    async def listen_and_look() -> None:
        async with ports.listen() as waker:
            while True:
                rest_s = await planner.look()
                retry.succeeded()
                await waker.wait(rest_s)

    while True:
        await retry.round(listen_and_look)
