"""The reconciler's loop: looks at everything once a second, and at once when it is woken."""

from services.controller.domain.resizing import Patience
from services.controller.loops.endurance import Endurance
from services.controller.ports.office import Ports
from services.controller.use_cases.reconcile import Reconciler


async def reconcile(ports: Ports, epoch: int, patience: Patience) -> None:
    """Reconcile for ever.

    Raises:
        DeposedError: The reign is over.
    """
    reconciler = Reconciler(ports, epoch, patience)
    endurance = Endurance("reconciler", reconciler.forget_health)

    async def listen_and_look() -> None:
        async with ports.listen() as waker:
            while True:
                rest_s = await reconciler.look()
                endurance.succeeded()
                await waker.wait(rest_s)

    while True:
        await endurance.round(listen_and_look)
