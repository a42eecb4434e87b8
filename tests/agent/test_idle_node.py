"""A node that has nothing to do measures itself."""

import contextlib
from pathlib import Path

import psutil
import pytest

from services.contract.messages.commands import StopGang
from services.contract.messages.facts import GangProgressed
from services.contract.messages.probing import NodeMeasured
from services.contract.messages.warm_channel import NODE_MARK
from services.local.embedded_redis import EmbeddedRedis
from tests.agent.conftest import FOREVER, Controller, agents_on, launch
from tests.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.redis, pytest.mark.system]


def test_an_idle_node_is_measured_before_a_plan_asks_and_ranks_that_start_come_first(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    redis_server.flush()
    controller = Controller(redis_server.url)
    controller.open_job()
    with agents_on(redis_server.url, tmp_path) as start:
        agent = start(MESHLOOM_MEASURE_IDLE_S="0.01", MESHLOOM_CPU_SLOTS="1")
        until(lambda: [pid for pid in agent.marked() if _is_self_test(pid)], timeout_s=240)
        controller.send(launch(1, 1, FOREVER, pause_s=0.01))
        controller.fact(GangProgressed)
        until(lambda: not [pid for pid in agent.marked() if _is_self_test(pid)])
        assert not controller.all_of(NodeMeasured), "a failure that nobody asked for is not told"
        controller.send(StopGang(job_id=launch().job_id, fence=1, mode="kill"))
        assert until(lambda: controller.all_of(NodeMeasured), timeout_s=240)[0].facts is not None
    controller.client.close()


def _is_self_test(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return "self-test" in psutil.Process(pid).environ().get(NODE_MARK, "")
    return False
