"""What an agent finds when it looks into its ranks: facts alone, the verdict is the controller's."""

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, FailFast, Field

from services.contract.messages.base import Address, Message
from services.contract.words.bounds import (
    AtMostOnePerRankOfANode,
    Name,
    Numbers,
    Positive,
    Seconds,
    Text,
    Traceback,
    Whole,
    shortened,
)

_FRAMES: Final = 256
_BRIEF_FRAMES: Final = 4
_BRIEF_CHARACTERS: Final = 256
MOST_CONNECTIONS: Final = 64
_MOST_CONNECTIONS_OF_ALL: Final = 4_096


class Unanswered(Message):
    """A TCP connection on which what is sent gets no acknowledgement: it was sent again ``retries`` times.

    ``here`` and ``there`` are its ends. ``waiting_bytes`` are sent or to be sent, and not acknowledged.
    ``is_open``: it was opened before; if not, the other end has never answered.
    """

    here: Address
    there: Address
    retries: Positive
    waiting_bytes: Whole = 0
    is_open: bool = True


class RankFinding(Message):
    """One rank as seen from outside.

    ``process`` is the kernel's letter for its state (R, S, D, T, Z…), empty where it is gone.
    ``still_s`` is the age of its board's last store, ``pulse_age_s`` that of the pulse, for which
    the rank's interpreter lock is needed. ``frames`` are the Python frames of the training thread,
    innermost first; ``stacks`` those of all threads as faulthandler writes them, None where the
    rank did not answer. ``lost_thread``: the last that it wrote to stderr tells of a thread that ended
    because memory was refused. ``unanswered``: its connections whose other end acknowledges nothing.
    """

    rank: Whole
    pid: Whole
    phase: Name
    unit: Name | None = None
    step: Whole = 0
    process: Name = ""
    still_s: Seconds = 0.0
    pulse_age_s: Seconds | None = None
    issued: Numbers = Field(default_factory=dict)
    completed: Numbers = Field(default_factory=dict)
    frames: Annotated[tuple[Text, ...], FailFast(), Field(max_length=_FRAMES)] = ()
    stacks: Traceback | None = None
    lost_thread: bool = False
    unanswered: Annotated[
        tuple[Unanswered, ...], FailFast(), Field(max_length=MOST_CONNECTIONS)
    ] = ()


def in_brief(found: RankFinding) -> RankFinding:
    """Without its stacks, and with the innermost frames alone."""
    frames = tuple(shortened(frame, _BRIEF_CHARACTERS) for frame in found.frames[:_BRIEF_FRAMES])
    return found.model_copy(update={"stacks": None, "frames": frames})


def _with_few_connections(ranks: object) -> object:
    """Of all ranks together a few thousand connections: each is three objects."""
    if not isinstance(ranks, list):
        return ranks
    room = _MOST_CONNECTIONS_OF_ALL
    kept: list[object] = []
    for rank in ranks:
        told = rank.get("unanswered") if isinstance(rank, dict) else None
        if isinstance(rank, dict) and isinstance(told, list):
            kept.append({**rank, "unanswered": told[:room]})
            room -= min(len(told), room)
        else:
            kept.append(rank)
    return kept


class Findings(Message):
    """All ranks of an attempt on one node.

    ``why``: a person asked, or the ranks made no progress for ``still_s`` seconds, which is longer
    than the ``allowed_s`` that they had.
    """

    why: Literal["asked", "hang"]
    still_s: Seconds
    allowed_s: Seconds
    ranks: Annotated[
        tuple[RankFinding, ...],
        FailFast(),
        BeforeValidator(_with_few_connections),
        AtMostOnePerRankOfANode,
    ]
