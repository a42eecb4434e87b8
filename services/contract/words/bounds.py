"""How long what ranks and agents say may be: what people read is cut with a mark, what must be exact is refused.

A rank runs the user's code, and any process that has an agent's password of Redis speaks as an agent.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints

ERROR_CHARACTERS: Final = 4_096
TRACEBACK_CHARACTERS: Final = 32_768
NAME_CHARACTERS: Final = 256
BASELINES_KEPT: Final = 8
METRIC_NAMES_KEPT: Final = 64
"""So many names of a user's metrics are kept of a job."""
METRIC_NAME_CHARACTERS: Final = 64
FIELDS_OF_A_STEP: Final = frozenset(
    {
        *("step", "fence", "of", "time_ms", "loss", "grad_norm", "learning_rate"),
        *("tokens_per_s", "step_time_s", "data_wait_s", "memory_bytes", "mfu"),
    }
)
"""What a row of a step has beside the user's metrics."""
EVALUATION_METRICS_KEPT: Final = 16
MOST_RANKS: Final = 65_536
MOST_RANKS_OF_A_NODE: Final = 8_192
_ERROR_TYPES_KEPT: Final = 32
_NOTICES_KEPT: Final = 8
_VERSIONS_KEPT: Final = 64
_GROUPS_KEPT: Final = 64
_ADDRESSES_KEPT: Final = 16
_DETAILS_KEPT: Final = 64
MOST_ATTEMPTS: Final = 1_000_000_000
"""No job that is known goes on from a higher number because a node tells of it: its next ones have higher numbers."""
MOST_TOLD_ATTEMPTS: Final = 9_999_999_999
"""Names of checkpoints hold ten digits. Of attempts above ``MOST_ATTEMPTS`` nodes must still be able to tell."""
MOST_WHOLE: Final = (1 << 63) - 1
MOST_SECONDS: Final = 1e9
"""No duration that a rank reports is longer: some thirty years. Beyond it sums would overflow."""
MOST_MS: Final = 253_402_300_799_000
"""The end of the year 9999, in milliseconds since 1970: no later time can be shown."""


_Item = TypeVar("_Item", bound=BaseModel)
_masks: Final[list[Callable[[str], str]]] = []


def mask_before_cuts(mask: Callable[[str], str]) -> None:
    """Has all texts of this process masked before they are cut: half a secret is none that an agent would know.

    For processes of users' code, which have the secrets of one job.
    """
    _masks[:] = [mask]


def _masked(text: str) -> str:
    for mask in _masks:
        text = mask(text)
    return text


def shortened(text: str, limit: int) -> str:
    """``text``, its middle cut where it has more than ``limit`` characters, with a mark.

    The two ends say where and what. Halves of surrogate pairs, as in names of files that are no UTF-8,
    are written as escapes: no JSON holds them.
    """
    text = encodable(text)
    if len(text) > limit:
        text = _masked(text)
    if len(text) <= limit:
        return text
    mark = f" … {len(text) - limit} characters cut … "
    half = (limit - len(mark)) // 2
    return f"{text[:half]}{mark}{text[-half:]}"


def within_room(
    items: Iterable[_Item], room: int, brief: Callable[[_Item], _Item]
) -> tuple[_Item, ...]:
    """All items, in their order: the first that take ``room`` bytes of JSON together as they are, the others ``brief``.

    A text of control characters takes six bytes for each.
    """
    kept = []
    for item in items:
        room -= len(item.model_dump_json().encode())
        kept.append(item if room >= 0 else brief(item))
    return tuple(kept)


def encodable(text: str) -> str:
    """``text`` with escapes in place of halves of surrogate pairs."""
    return text.encode(errors="backslashreplace").decode()


def cut_to(limit: int) -> BeforeValidator:
    """Of a text: has it ``shortened``."""

    def cut(value: object) -> object:
        # Of thousands of ranks a second these are short and plain.
        if not isinstance(value, str) or (len(value) <= limit and value.isascii()):
            return value
        return shortened(value, limit)

    return BeforeValidator(cut)


def _few_baselines(baselines: object) -> object:
    """The first of them that are finite, for JSON has no word for other numbers; names cut."""
    if not isinstance(baselines, dict):
        return baselines
    # No more are looked at than are kept: a line of a megabyte has room for a hundred thousand.
    finite = ((name, float(value)) for name, value in baselines.items() if _is_finite(value))
    first = itertools.islice(finite, BASELINES_KEPT)
    return {shortened(str(name), NAME_CHARACTERS): value for name, value in first}


def _few_metrics(values: object, most: int = METRIC_NAMES_KEPT) -> object:
    """The first of them; names cut, and without what would break a line or a list of names.

    None in place of what is no finite number.
    """
    if not isinstance(values, dict):
        return values
    return {
        metric_name(str(name)): float(value) if _is_finite(value) else None
        for name, value in itertools.islice(values.items(), most)
    }


def _few_of_the_user(values: object) -> object:
    """The same of metrics that stand in a row beside a step's own fields, which they must not replace."""
    few = _few_metrics(values)
    if not isinstance(few, dict):
        return few
    return {
        f"user/{name}" if name in FIELDS_OF_A_STEP else name: value for name, value in few.items()
    }


def metric_name(name: str) -> str:
    """A metric's name as it is kept: printable, without commas, of at most 64 characters."""
    # One letter more tells that it is cut; a job may have millions of names, nearly all of them plain.
    plain = _masked(name)[: METRIC_NAME_CHARACTERS + 1]
    if not plain.isprintable() or "," in plain:
        plain = "".join(c if c.isprintable() and c != "," else "_" for c in plain)
    if len(plain) > METRIC_NAME_CHARACTERS:
        return plain[: METRIC_NAME_CHARACTERS - 1] + "…"
    return plain or "_"


def _is_finite(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) <= MOST_WHOLE


def _first(limit: int) -> BeforeValidator:
    """Of a list: has its first items kept."""
    return BeforeValidator(
        lambda items: items[:limit] if isinstance(items, list | tuple) else items
    )


def _at_most(limit: int) -> BeforeValidator:
    # Before the items are looked at: each that is wrong makes an error, and a million of them take seconds.
    def check(value: Any) -> Any:  # noqa: ANN401 whatever stands there
        if isinstance(value, Mapping | list | tuple) and len(value) > limit:
            raise ValueError(f"more than {limit} items")
        return value

    return BeforeValidator(check)


Whole = Annotated[int, Field(ge=0, le=MOST_WHOLE)]
"""Of 64 bits: one of hundreds of digits has no float, and whatever counts with it fails."""
Positive = Annotated[int, Field(ge=1, le=MOST_WHOLE)]
"""The same, from 1."""
Moment = Annotated[int, Field(ge=0, le=MOST_MS)]
"""Milliseconds since 1970. A type of its own: of a second bound that a field adds to ``Whole`` only the wider one is looked at."""
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
"""For how long something took or has been so. JSON has no word for NaN and infinity: a record with one cannot be read again."""
Code = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
"""What a process ended with: an exit code, a signal."""
Text = Annotated[str, cut_to(ERROR_CHARACTERS)]
"""For people: an error, a reason."""
Name = Annotated[str, cut_to(NAME_CHARACTERS)]
"""For people: of a unit, a phase, a file."""
Traceback = Annotated[str, cut_to(TRACEBACK_CHARACTERS)]
"""For people: of one thread or of all."""
ErrorTypes = Annotated[tuple[Name, ...], _first(_ERROR_TYPES_KEPT)]
"""Qualified names of an exception's classes, the first 32."""
Notices = Annotated[tuple[Text, ...], _first(_NOTICES_KEPT)]
"""What people should know of a run that goes on, the first eight."""
GroupName = Annotated[str, StringConstraints(max_length=64)]
Digest = Annotated[
    str,
    StringConstraints(max_length=1_024),
    BeforeValidator(lambda text: encodable(text) if isinstance(text, str) else text),
]
Addresses = Annotated[tuple[Name, ...], _first(_ADDRESSES_KEPT)]
"""Of an interface, the first 16."""
Incarnation = Annotated[str, StringConstraints(max_length=NAME_CHARACTERS)]
Baselines = Annotated[dict[str, float], BeforeValidator(_few_baselines)]
"""Losses of simple models by their names, the first eight that are finite."""
MetricValues = Annotated[dict[str, float | None], BeforeValidator(_few_of_the_user)]
"""Values by name, at most 64; None: no finite number."""
EvaluationMetrics = Annotated[
    dict[str, float | None],
    BeforeValidator(lambda values: _few_metrics(values, EVALUATION_METRICS_KEPT)),
]
"""The same of a validation pass, of which a job's record keeps many: at most 16."""
Versions = Annotated[dict[Name, Name], _at_most(_VERSIONS_KEPT)]
Numbers = Annotated[
    dict[GroupName, Annotated[int, Field(ge=-MOST_WHOLE, le=MOST_WHOLE)]], _at_most(_GROUPS_KEPT)
]
"""Collective sequence numbers by process group."""
Details = Annotated[
    dict[GroupName, int | float | Annotated[str, cut_to(ERROR_CHARACTERS)]],
    _at_most(_DETAILS_KEPT),
]
"""How something was found, for people."""
FewDevices: Final = _at_most(1_024)
"""For accelerators of a node: each look of the controller reads those of all nodes."""
FewGangs: Final = _at_most(1_024)
"""For gangs of a node: of each the controller reads the job when the node joins."""
AtMostOnePerRank: Final = _at_most(MOST_RANKS)
"""For what has an item a rank, or fewer."""
AtMostOnePerRankOfANode: Final = _at_most(MOST_RANKS_OF_A_NODE)
"""The same of what an agent tells of its own ranks; also for what is told in several parts."""
