"""Loaded by every interpreter of the faulty stack; in its agent, points at which a commit dies."""

import json
import os
import sys
from typing import Any

if "services.worker.agent" in sys.orig_argv:
    from tests.e2e.faults.fault_points import strike

    _link = os.link

    def _commits_step_40(path: Any) -> bool:  # noqa: ANN401 as the system's
        try:
            with open(path, "rb") as file:  # noqa: PTH123 light enough for every start
                record = json.load(file)
        except (OSError, ValueError):
            return False
        return bool(record.get("kind") == "checkpoint_committed" and record.get("step") == 40)

    def _faulty_link(source: Any, target: Any, **options: Any) -> None:  # noqa: ANN401 as above
        watched = _commits_step_40(source)
        if watched:
            strike("before_link")
        _link(source, target, **options)
        if watched:
            strike("after_link")

    _os: Any = os  # what is replaced in it is none of its business
    _os.link = _faulty_link
