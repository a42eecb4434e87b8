"""A cell of the grid: one way of training, as data.

The reference trains in every cell (each runs it). What it refuses stands in the table of
`tests/engine/test_reference_errors.py`, with whether ours serves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

Precision = Literal["fp32", "bf16"]
Weights = Literal["even", "tied", "frozen", "uneven", "unused"]
Accumulate = Literal["no", "with sync", "without sync"]
Mesh = Literal["flat", "HSDP", "TP"]

WORLDS = (1, 2, 3, 4)
# Meshes of two axes are two by two.
MESH_RANKS = 4
# Of four ranks, the one proper divisor: forward ends with parameters sliced over two of them.
RESHARD_SIZE = 2


@dataclass(frozen=True)
class Cell:
    """What is trained and how; the defaults are the plain way.

    Attributes:
        world: Ranks.
        precision: fp32 throughout, or parameters gathered in bf16 and reduced in fp32.
        reshard: `reshard_after_forward` of every unit.
        weights: Every dim divides among the ranks; or two are tied; some frozen; none divides;
            or one is used by no forward.
        accumulate: Two microbatches a step, with or without a reduction of the first.
        checkpointed: Blocks recompute their activations.
        grouped: Two blocks are one unit.
        offloaded: Slices live in host memory.
        mesh: All ranks shard; two replicas of two (HSDP); two shards of two-way tensor parallel.
        meta: Sharded on the meta device, materialised afterwards.
    """

    world: int
    precision: Precision = "fp32"
    reshard: bool | int | None = True
    weights: Weights = "even"
    accumulate: Accumulate = "no"
    checkpointed: bool = False
    grouped: bool = False
    offloaded: bool = False
    mesh: Mesh = "flat"
    meta: bool = False

    def __str__(self) -> str:
        """What a person reads in the list of tests."""
        ranks = f"{self.world} rank{'s' * (self.world > 1)}"
        words: dict[bool | int | None, str] = {
            True: "reshard",
            False: "keep",
            None: "reshard by default",
        }
        # No reshard size is 1, which would equal True: it means the same as keeping.
        reshard = words.get(self.reshard, f"reshard to {self.reshard}")
        return ", ".join([ranks, self.precision, reshard, *self.features])

    @property
    def features(self) -> list[str]:
        """In what the cell differs from the plain way."""
        chosen = {
            self.weights: self.weights != "even",
            f"accumulated {self.accumulate}": self.accumulate != "no",
            "checkpointed": self.checkpointed,
            "grouped": self.grouped,
            "offloaded": self.offloaded,
            self.mesh: self.mesh != "flat",
            "meta": self.meta,
        }
        return [word for word, is_chosen in chosen.items() if is_chosen]

    @property
    def microbatches(self) -> int:
        """Backwards per optimizer step."""
        return 1 if self.accumulate == "no" else 2

    @property
    def data_ranks(self) -> int:
        """Ranks with data of their own; those of one tensor-parallel group see the same."""
        return self.world // 2 if self.mesh == "TP" else self.world

    @property
    def reduce_size(self) -> int:
        """Ranks of one reduce-scatter."""
        return self.world if self.mesh == "flat" else self.world // 2

    @property
    def is_possible(self) -> bool:
        """Whether the ranks can form the mesh, and the reshard size is a proper divisor."""
        if self.mesh != "flat" and self.world != MESH_RANKS:
            return False
        is_size = not isinstance(self.reshard, bool | None)
        return not is_size or (self.world == MESH_RANKS and self.mesh == "flat")


# Every factor and its values, in the order of Cell's fields.
FACTORS: dict[str, tuple[object, ...]] = {
    "world": WORLDS,
    "precision": get_args(Precision),
    "reshard": (True, False, RESHARD_SIZE),
    "weights": get_args(Weights),
    "accumulate": get_args(Accumulate),
    "checkpointed": (False, True),
    "grouped": (False, True),
    "offloaded": (False, True),
    "mesh": get_args(Mesh),
    "meta": (False, True),
}
_SETTINGS = ("world", "precision", "reshard")


def single_feature_cells() -> list[Cell]:
    """Every setting with every feature, one at a time: a failure names its cause."""
    kinds: list[dict[str, object]] = [{}]
    for name, (_, *others) in FACTORS.items():
        if name not in _SETTINGS:
            kinds += [{name: value} for value in others]
    settings = product(*(FACTORS[name] for name in _SETTINGS))
    cells = [
        cell_of({**dict(zip(_SETTINGS, s, strict=True)), **k}) for s in settings for k in kinds
    ]
    return [cell for cell in cells if cell.is_possible]


def cell_of(values: dict[str, object]) -> Cell:
    """The cell with these values, which FACTORS lists."""
    return Cell(**values)  # type: ignore[arg-type]  # as the table types them
