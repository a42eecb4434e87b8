"""Has models profiled on this node, and tells why where there is no profile.

Every question is answered again: what the user wrote may have changed since, and code that was not
uploaded has no digest. Whoever asks keeps the answers.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil
import structlog
from pydantic import ValidationError

from services.contract.messages.probe_ids import UnfitProfileError, refuse_unfit
from services.contract.messages.probe_programs import ProbeSeat
from services.contract.messages.probing import ModelProbed, ProbeFailure, ProbeModel
from services.contract.redis.redis_keys import LONGEST_FACT
from services.contract.system.long_work import uncollected
from services.contract.system.mask import Mask
from services.worker.agent.host.stacks import training_frames
from services.worker.agent.probes.programs import (
    ProgramCall,
    ProgramEnd,
    ProgramRunner,
)
from services.worker.agent.ranks.admission import Admission, NotAdmittedError
from services.worker.agent.ranks.code_cache import CodeCache, NoCodeError

# Below ranks, so that a step waits little for a probe; not far below, or on a node whose ranks take
# all processors a probe would not end in time.
NICENESS: Final = 5
# A profile of as many bytes as are taken has a third of a million.
_MOST_PARTS: Final = LONGEST_FACT // 16
_LACKS_MEMORY: Final = ("MemoryError", "bad_alloc", "Cannot allocate memory")
_log = structlog.get_logger()


class Prober:
    """Probes models on behalf of one node.

    Args:
        node_id: Who answers.
        admission: What jobs may have here.
        runner: Runs the probe's process.
        codes: The code that was uploaded for jobs.
    """

    def __init__(
        self, node_id: str, admission: Admission, runner: ProgramRunner, codes: CodeCache
    ) -> None:
        self._node_id = node_id
        self._admission = admission
        self._runner = runner
        self._codes = codes

    async def probe(self, command: ProbeModel) -> ModelProbed:
        """Run the probe to its end."""
        began = time.monotonic()
        try:
            secrets = self._admission.admit(command.spec)
        except NotAdmittedError as error:
            answer = self._failed(command, ProbeFailure(code="refused", reason=str(error)))
        else:
            answer = await self._ask_with_code(command, secrets)
        if answer.failure is not None:
            _log.warning("probe_failed", probe=command.probe_id, code=answer.failure.code)
        return answer.model_copy(
            update={
                "probe_id": command.probe_id,
                "node_id": self._node_id,
                "took_s": time.monotonic() - began,
            }
        )

    async def _ask_with_code(self, command: ProbeModel, secrets: Mapping[str, str]) -> ModelProbed:
        try:
            async with self._codes.kept(command.spec.code) as folder:
                return await self._ask(command, secrets, folder)
        except (NoCodeError, OSError) as error:
            return self._failed(command, ProbeFailure(code="refused", reason=str(error)))

    async def _ask(
        self, command: ProbeModel, secrets: Mapping[str, str], code: Path | None
    ) -> ModelProbed:
        seat = ProbeSeat(
            node_id=self._node_id,
            question=command,
            memory_bytes=command.memory_bytes or psutil.virtual_memory().available // 2,
            secrets=dict(secrets),
            data_roots=tuple(map(str, self._admission.data_roots)),
            private_folders=tuple(map(str, self._admission.private)),
            code_folder=None if code is None else str(code),
        )
        mask = Mask(secrets)
        call = ProgramCall(
            "services.worker.rank.probe.profile",
            command.probe_id,
            seat,
            command.timeout_s,
            NICENESS,
        )
        try:
            ended = await self._runner.ask(call)
        except OSError as error:
            reason = f"no process could be started for the probe: {error}"
            return self._failed(command, ProbeFailure(code="crashed", reason=reason))
        try:
            # Megabytes, and the loop renews the node's lease.
            return await asyncio.to_thread(_read, ended.answer, mask)
        except UnfitProfileError as error:
            return self._failed(command, ProbeFailure(code="raised", reason=str(error)))
        except ValidationError:
            why = await asyncio.to_thread(_failure, ended, command.timeout_s, mask)
            return self._failed(command, why)

    def _failed(self, command: ProbeModel, failure: ProbeFailure) -> ModelProbed:
        return ModelProbed(
            probe_id=command.probe_id, node_id=self._node_id, took_s=0.0, failure=failure
        )


def _read(answer: bytes, mask: Mask) -> ModelProbed:
    """What a probe answered, if it can be told: user code ran in that process, and may have written it.

    Raises:
        ValidationError: It is no answer.
        UnfitProfileError: Whoever plans could not work with it.
    """
    _refuse_large(len(answer))
    # While objects are made of it no other thread runs, the loop's neither, and the more there are, the longer for each.
    # So it is while it is masked.
    if (parts := answer.count(b"{") + answer.count(b"[")) > _MOST_PARTS:
        raise UnfitProfileError(
            f"the profile has {parts} lists and records, more than the {_MOST_PARTS} that are taken: the model has "
            "too many modules"
        )
    text = mask.message(answer)
    with uncollected():
        found = ModelProbed.model_validate_json(text)
        if found.profile is not None:
            refuse_unfit(found)
    _refuse_large(len(found.model_dump_json().encode()))
    return found


def _refuse_large(size: int) -> None:
    if size > LONGEST_FACT:
        raise UnfitProfileError(
            f"the profile has {size >> 20} MiB, more than the {LONGEST_FACT >> 20} MiB that are taken: "
            "the model has too many modules"
        )


def _failure(ended: ProgramEnd, timeout_s: float, mask: Mask) -> ProbeFailure:
    """Why a process did not answer."""
    # Code in C writes blocks: where it is ended one may stop within a secret.
    words = mask.cut_text(ended.words)
    traceback = words or None
    # Masked first: of the path of a frame the end is shown alone.
    frames = training_frames(mask.cut_text(ended.stacks)) or training_frames(words)
    where = f"; it was at {frames[0]}" if frames else ""
    if ended.code is None:
        reason = f"no profile within {timeout_s:g} s{where}"
        return ProbeFailure(code="timed_out", reason=reason, traceback=traceback)
    last = "".join(f": {line}" for line in words.splitlines()[-1:])
    reason = ended.how + (where or last)
    if ended.lacked_memory or any(word in words for word in _LACKS_MEMORY):
        return ProbeFailure(code="out_of_memory", reason=reason, traceback=traceback)
    return ProbeFailure(code="crashed", reason=reason, traceback=traceback)
