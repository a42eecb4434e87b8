"""What frees the shared memory that ranks left, where it cannot."""

import asyncio
import os

import pytest

from services.contract.system.rank_user import RankUser
from services.local.settings import child_environment
from services.worker.agent.host.left_memory import remove_as


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user")
def test_a_process_that_cannot_free_is_told() -> None:
    # As where that user may not read what it is to run.
    environment = child_environment(PYTHONHOME="/nonexistent")
    with pytest.raises(OSError, match="exited with code 1"):
        asyncio.run(remove_as(RankUser("root", 0, 0, "/"), environment))
