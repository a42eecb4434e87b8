"""The controller's process: ``python -m services.controller``.

Ends with code 2 if its settings are wrong, with 1 if its port is taken, with 0 when it is asked to.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

import structlog
import uvicorn
from pydantic import ValidationError

from services.contract.system.own_process import give_large_blocks_back, set_up_process
from services.contract.system.short_collections import keep_collections_short
from services.contract.words.error_values import setting_faults
from services.controller.adapters.http.webhooks import HttpWebhooks
from services.controller.adapters.pools.pools_file import PoolsFileError
from services.controller.adapters.redis import redis_ports
from services.controller.adapters.storage.exports import export_store
from services.controller.api.app import create_app
from services.controller.api.certificate import CertificateError, ServerCertificate
from services.controller.api.connections import (
    BoundedProtocol,
    BoundedTlsProtocol,
    ConnectionLimits,
    keep_tls_buffers_small,
)
from services.controller.api.context import Context
from services.controller.api.guard import AccessPolicy
from services.controller.api.monitoring import Monitor
from services.controller.api.sse import StreamSlots
from services.controller.api.uploads import Uploads
from services.controller.domain.access.code import CodeLimits
from services.controller.domain.access.rate import Rate
from services.controller.domain.scheduling.elastic import GrowthDelay
from services.controller.loops.leader import Leader
from services.controller.loops.leadership import run_term
from services.controller.loops.observer import Observer
from services.controller.ports.coordination import Ports
from services.controller.ports.jobs import Quota
from services.controller.ports.pools import RunnablePool
from services.controller.ports.tracing import Tracing
from services.controller.settings import Settings
from services.controller.use_cases.plans import Drawing

_log = structlog.get_logger()
_GRACE_S = 1
_TICK_S = 1.0
# As many wait to be accepted as the kernel keeps for us. Of those so many are accepted in a round of the loop, for only
# then is seen how many are open: all at once would take every descriptor, whatever MESHLOOM_MAX_CONNECTIONS says. And a
# request takes ten rounds, in which as many must not come as there may be: it would give way to them.
_WAITING = 512
_ACCEPTED_AT_A_TIME = 8


class ControllerServer(uvicorn.Server):
    """A server that tells its open streams when it is about to end.

    Args:
        config: As uvicorn wants it.
        stopping: Set at the first signal.
        certificate: With which it serves HTTPS; None: HTTP.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        stopping: asyncio.Event,
        certificate: ServerCertificate | None = None,
    ) -> None:
        config.backlog = _ACCEPTED_AT_A_TIME
        super().__init__(config)
        self._stopping = stopping
        self._certificate = certificate

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End: the streams first, for uvicorn waits for them."""
        self._stopping.set()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        for listener in sockets or ():
            # asyncio takes one number for how many wait and for how many it accepts at a time.
            listener.listen(_WAITING)

    async def main_loop(self) -> None:
        """Serve until told to end. It looks each second, where uvicorn's own looks ten times."""
        while not await self.on_tick(0):
            if self._certificate is not None:
                self._certificate.renew()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopping.wait()


def main() -> None:
    """Run until a signal comes."""
    set_up_process(holds_secrets=True)
    keep_collections_short()
    give_large_blocks_back()
    _use_all_descriptors()
    try:
        settings = Settings()
    except ValidationError as error:
        sys.stderr.write(f"meshloom-controller: {'; '.join(setting_faults(error))}\n")
        sys.exit(2)
    _set_up_logging(settings.log_level)
    try:
        pools = _pools(settings)
    except PoolsFileError as error:
        sys.stderr.write(f"meshloom-controller: {error}\n")
        sys.exit(2)
    try:
        certificate = _certificate(settings)
    except CertificateError as error:
        sys.stderr.write(f"meshloom-controller: MESHLOOM_TLS_CERT: {error}\n")
        sys.exit(2)
    try:
        listener = _listen(settings.host, settings.port)
    except OSError as error:
        sys.stderr.write(
            f"meshloom-controller: cannot listen on {settings.host}:{settings.port} "
            f"({error.strerror}); set MESHLOOM_PORT to a free port, or to 0 for any\n"
        )
        sys.exit(1)
    asyncio.run(_serve_until_signalled(settings, listener, pools, certificate))


async def _serve_until_signalled(
    settings: Settings,
    listener: socket.socket,
    pools: Sequence[RunnablePool],
    certificate: ServerCertificate | None,
) -> None:
    # uvicorn raises the signal again once it has shut down; without a handler of ours that would
    # end the process before the lead is given back.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    await serve(settings, listener, pools, certificate)


async def serve(
    settings: Settings,
    listener: socket.socket,
    pools: Sequence[RunnablePool] = (),
    certificate: ServerCertificate | None = None,
) -> None:
    """Serve on ``listener``, and lead whenever the lead is free, until a signal comes.

    Raises:
        SystemExit: With code 1: the loops have died of an error that nobody expected.
    """
    stopping = asyncio.Event()
    kept_s = int(settings.keep_telemetry_days * 86_400)
    async with (
        redis_ports(
            settings.redis_address,
            settings.max_streams,
            telemetry_url=settings.telemetry_redis_address,
            telemetry_kept_s=kept_s,
            telemetry_secret=settings.secret_of_telemetry,
            quota=Quota(
                settings.max_unfinished_jobs,
                settings.max_jobs,
                settings.max_unfinished_spec_bytes,
            ),
        ) as bare_ports,
        HttpWebhooks(settings.webhook_hosts) as webhooks,
        contextlib.AsyncExitStack() as ends,
    ):
        holder = f"{socket.gethostname()}-{secrets.token_hex(8)}"
        growth_delay = GrowthDelay(stable_ms=int(settings.grow_after_s * 1000))
        drawing = Drawing(settings.plan_wait_s, settings.probe_timeout_s)
        troubles: dict[str, str] = {}
        silent_pools: dict[str, str] = {}
        monitor = Monitor(silent_pools)
        limits = tuple(each.pool.limits for each in pools)
        ports, tracing = _traced(
            dataclasses.replace(bare_ports, pools=limits), settings.otel_endpoint, ends
        )
        for each in pools:
            ends.push_async_callback(each.pool.close)
        rule = functools.partial(
            run_term,
            ports,
            drawing=drawing,
            growth_delay=growth_delay,
            troubles=troubles,
            observer=Observer(
                monitor.looked,
                monitor.fact_handled,
                contextlib.nullcontext if tracing is None else tracing.looking,
            ),
            webhooks=webhooks,
            pools=pools,
            silent_pools=silent_pools,
        )
        leader = Leader(ports.leadership, holder, rule)
        context = Context(
            ports,
            monitor,
            stopping,
            lambda: leader.epoch,
            settings.entry_points,
            StreamSlots(settings.max_streams),
            drawing,
            lambda: leader.trouble or next(iter(troubles.values()), None),
            Uploads(CodeLimits(settings.max_code_mib << 20, settings.max_code_store_mib << 20)),
            settings.max_priority,
            export_store(settings.checkpoint_root),
            webhooks,
            tracing,
            silent_pools,
        )
        config = uvicorn.Config(
            create_app(context, _policy(settings)),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            http=(BoundedProtocol if certificate is None else BoundedTlsProtocol).within(
                ConnectionLimits(settings.request_timeout_s, settings.max_connections)
            ),
            # No route speaks WebSocket; none of its libraries need look at a request.
            ws="none",
        )
        if certificate is not None:
            keep_tls_buffers_small()
            config.load()
            config.ssl = certificate.context
        leading = asyncio.create_task(leader.lead())
        leading.add_done_callback(_die_with_the_leader)
        host, port = listener.getsockname()[:2]
        scheme = "http" if certificate is None else "https"
        _log.info("listening", url=f"{scheme}://{_bracketed(host)}:{port}", holder=holder)
        try:
            await ControllerServer(config, stopping, certificate).serve(sockets=[listener])
        finally:
            leading.cancel()
            await asyncio.wait([leading])
            _log.info("stopped")
        if not leading.cancelled():
            # It died: whoever supervises this process must not take that for a wanted end.
            sys.exit(1)


def _certificate(settings: Settings) -> ServerCertificate | None:
    if settings.tls_cert is None:
        return None
    return ServerCertificate(settings.tls_cert, settings.tls_key)


def _pools(settings: Settings) -> Sequence[RunnablePool]:
    if settings.pools_file is None:
        return ()
    from services.controller.adapters.pools import open_pools  # noqa: PLC0415 few need what it imports

    return open_pools(settings.pools_file, settings.variables)


def _traced(
    ports: Ports, endpoint: str | None, ends: contextlib.AsyncExitStack
) -> tuple[Ports, Tracing | None]:
    """The ports, traced if there is an endpoint; traces are sent to their end when ``ends`` does."""
    if endpoint is None:
        return ports, None
    try:
        from services.controller.adapters.otel.tracing import (  # noqa: PLC0415 an extra
            OtelTracing,
        )
    except ImportError as error:
        sys.stderr.write(
            f"meshloom-controller: MESHLOOM_OTEL_ENDPOINT is set, but {error.name} is not "
            "installed: pip install 'meshloom[otel]', or unset it\n"
        )
        sys.exit(2)
    tracing = OtelTracing(endpoint)
    # It may wait for the collector: leases are renewed meanwhile.
    ends.push_async_callback(asyncio.to_thread, tracing.close)
    return dataclasses.replace(ports, jobs=tracing.traced(ports.jobs)), tracing


def _die_with_the_leader(leading: "asyncio.Task[None]") -> None:
    """A controller whose loops have died must not look alive: it ends, and is restarted."""
    if not leading.cancelled() and leading.exception() is not None:
        _log.critical("leader_died", exc_info=leading.exception())
        signal.raise_signal(signal.SIGTERM)


def _policy(settings: Settings) -> AccessPolicy:
    token = None if settings.token is None else settings.token.get_secret_value()
    return AccessPolicy(
        token=token,
        names=settings.allowed_hosts,
        rate=Rate(settings.rate_per_s, settings.rate_burst),
    )


def _use_all_descriptors() -> None:
    """Many systems give a process 1024 unless it asks for more, and each connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_WAITING)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _set_up_logging(level: str) -> None:
    """One JSON object a line on stderr, from our loggers and from the libraries'."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    # It warns of each request that is no HTTP, and strangers may send such forever.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    # It warns of each header of a trace that it cannot read, and repeats it.
    logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


if __name__ == "__main__":
    main()
