"""What the units of a plan weigh on one rank: each parameter's slice, whole and travelling sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

from fsdp_core.errors import PlanError
from fsdp_core.layout import Slicing
from fsdp_core.plan.model.profile import ModelProfile, ParameterFacts
from fsdp_core.plan.model.resolve import ResolvedUnit, matching, resolve_units
from fsdp_core.plan.model.sharding import (
    Precision,
    ShardingPlan,
    TensorParallelPlan,
    TensorParallelStyle,
    matches,
    shared_memory_of_unit,
)

ITEMSIZE: dict[Precision, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
DTYPE_WORD = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True)
class ParamShare:
    """One parameter on one rank; see `fsdp_core.param.fsdp_param` for the words.

    Attributes:
        facts: Of the whole.
        place: In the profile's list.
        slicing: Of what this rank's tp group leaves it.
        smaller: Of the whole for `reshard_after_forward` to a smaller group.
        compute: Bytes of an element in computation.
        reduce: Bytes of an element in a reduction.
        travels_as: Words that differ where dtypes of computation differ.
        reduces_as: The same for reductions.
        state_shape: Of what this rank's optimizer sees.
    """

    facts: ParameterFacts
    place: int
    slicing: Slicing
    smaller: Slicing | None
    compute: int
    reduce: int
    travels_as: str
    reduces_as: str
    state_shape: tuple[int, ...]

    @property
    def state_numel(self) -> int:
        """Elements that this rank's optimizer sees."""
        return prod(self.state_shape)

    @property
    def slice_bytes(self) -> int:
        """The padded slice."""
        return self.slicing.row * self.facts.itemsize

    @property
    def whole_bytes(self) -> int:
        """Whole and unpadded, in the dtype of computation; a gradient of it, too."""
        return self.slicing.total * self.compute

    @property
    def unsharded_bytes(self) -> int:
        """The buffer of the whole parameter."""
        ways = [way for way in (self.slicing, self.smaller) if way is not None]
        return self.compute * max(way.row * way.parts if way.leads else way.total for way in ways)

    def landing_bytes(self, *, from_smaller: bool) -> int:
        """What a gather arrives in, beside the whole, where rows end to end are not the whole."""
        way = self.smaller if from_smaller and self.smaller is not None else self.slicing
        return 0 if way.leads else way.row * way.parts * self.compute

    @property
    def is_cast(self) -> bool:
        """Whether computation has it in another dtype than the slice."""
        return self.travels_as not in (self.facts.dtype, DTYPE_WORD.get(self.facts.dtype, ""))

    @property
    def can_be_one_copy(self) -> bool:
        """Whether all ranks of a host may compute with the same memory of it."""
        return self.slicing.leads and not self.is_cast

    @property
    def stacked_bytes(self) -> int:
        """A gradient rearranged into rows, where it has to be."""
        if self.slicing.dim in (0, None):
            return 0
        return self.slicing.row * self.slicing.parts * self.compute


@dataclass(frozen=True)
class UnitShare:
    """One unit on one rank.

    Attributes:
        unit: Its modules and options.
        index: Its place in the order of the model's modules; 0 for the root.
        own: Parameters it has charge of.
        borrowed: Units that have charge of parameters which it shares.
        reshards: Whether forward ends with slices.
        shared: How ranks of one host exchange what it gathers and reduces.
        is_written: Whether forward writes one of its parameters.
        forward_prefetch: Units whose gather starts with its forward; None: the predicted one.
        backward_prefetch: The same in backward.
    """

    unit: ResolvedUnit
    index: int
    own: tuple[ParamShare, ...]
    borrowed: tuple[int, ...]
    reshards: bool
    shared: Literal["none", "copy", "storage"]
    is_written: bool
    forward_prefetch: tuple[int, ...] | None
    backward_prefetch: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """Its modules."""
        return ", ".join(self.unit.names)

    @cached_property
    def keeps_part(self) -> bool:
        """Whether forward reshards to a smaller group."""
        return any(param.smaller is not None for param in self.own)

    def is_one_copy(self, param: ParamShare) -> bool:
        """Whether all ranks of a host compute with the same memory of a parameter of its own."""
        return self.shared == "storage" and param.can_be_one_copy

    def gather_row(self, *, from_smaller: bool) -> int:
        """Bytes that this rank contributes to a gather."""
        return sum(
            (param.smaller if from_smaller and param.smaller else param.slicing).row * param.compute
            for param in self.own
        )

    @cached_property
    def copied_row(self) -> int:
        """Of what this rank contributes to a gather through shared memory, bytes that are copied."""
        return sum(
            param.slicing.row * param.compute for param in self.own if not self.is_one_copy(param)
        )

    @cached_property
    def travels_as_bytes(self) -> bool:
        """Whether parameters of several dtypes are cast before they are packed."""
        return len({param.travels_as for param in self.own}) > 1


def shares_of(
    profile: ModelProfile, plan: ShardingPlan, shard_rank: int = 0
) -> tuple[UnitShare, ...]:
    """The units of `plan`, in the order of the model's modules, the root first.

    Args:
        profile: Of the model.
        plan: For any mesh.
        shard_rank: The rank's place along `dp_shard`; the first holds most.

    Raises:
        PlanError: The plan does not fit the model.
    """
    calls = resolve_units(plan, profile.modules)
    places = {name: place for place, name in enumerate(profile.modules)}
    order = sorted(range(len(calls)), key=lambda call: min(places[n] for n in calls[call].names))
    index_of = {call: index for index, call in enumerate(order)}
    unit_of_module = {name: call for call, unit in enumerate(calls) for name in unit.names}
    styles = _styles(plan.tensor_parallel, profile.modules) if plan.mesh.tp > 1 else {}

    own: dict[int, list[ParamShare]] = {call: [] for call in range(len(calls))}
    borrowed: dict[int, dict[int, None]] = {call: {} for call in range(len(calls))}
    written: set[int] = set()
    for place, facts in enumerate(profile.parameters):
        holders = {_holder(name, unit_of_module): name for name in (*facts.also, facts.name)}
        written |= set(holders) if facts.is_written else set()
        first = min(holders)  # units are applied in the order of `calls`
        share = _param_share(plan, calls[first], facts, place, (holders[first], styles, shard_rank))
        own[first].append(share)
        for other in holders:
            if other != first:
                borrowed[other][index_of[first]] = None
    line = [index for index, call in enumerate(order) if not calls[call].is_root]
    return tuple(
        UnitShare(
            calls[call],
            index,
            tuple(own[call]),
            tuple(borrowed[call]),
            _reshards(calls[call]),
            shared_memory_of_unit(
                plan, calls[call].plan, profile.device_type, is_written=call in written
            ),
            call in written,
            *_prefetch(calls[call], index, line),
        )
        for index, call in enumerate(order)
    )


# Models repeat themselves, and a search asks for many plans of one model.
@lru_cache(maxsize=16_384)
def _cut(shape: tuple[int, ...], dim: int | None, parts: int) -> Slicing:
    return Slicing.of(shape, dim, parts)


@lru_cache(maxsize=16_384)
def _own_shape(slicing: Slicing, part: int) -> tuple[int, ...]:
    return tuple(slicing.shape_of(part))


@lru_cache(maxsize=4)
def _styles(
    splits: tuple[TensorParallelPlan, ...], modules: tuple[str, ...]
) -> Mapping[str, TensorParallelStyle]:
    return {
        name: each.style
        for each in splits
        for pattern in each.modules
        for name in matching(pattern, modules)
    }


def _holder(name: str, unit_of_module: Mapping[str, int]) -> int:
    """The unit, by number of its call, of the innermost module around a parameter."""
    module = name.rpartition(".")[0]
    while module not in unit_of_module:
        module = module.rpartition(".")[0]
    return unit_of_module[module]


def _param_share(
    plan: ShardingPlan,
    unit: ResolvedUnit,
    facts: ParameterFacts,
    place: int,
    seen: tuple[str, Mapping[str, TensorParallelStyle], int],
) -> ParamShare:
    name, styles, shard_rank = seen
    shape = _split_shape(facts, name, styles, plan.mesh.tp)
    dim = _dim(unit, name, len(shape))
    parts = plan.mesh.dp_shard
    slicing = _cut(shape, dim, parts)
    param = unit.plan.param_dtype or plan.param_dtype
    reduce = unit.plan.reduce_dtype or plan.reduce_dtype
    casts = param is not None and facts.is_floating
    compute = ITEMSIZE[param] if casts and param is not None else facts.itemsize
    travels_as = str(param) if casts else facts.dtype
    reduces = reduce is not None and reduce != param
    return ParamShare(
        facts,
        place,
        slicing,
        _smaller(unit, slicing),
        compute,
        ITEMSIZE[reduce] if reduces and reduce is not None else compute,
        travels_as,
        str(reduce) if reduces else travels_as,
        _own_shape(slicing, shard_rank),
    )


def _split_shape(
    facts: ParameterFacts, name: str, styles: Mapping[str, TensorParallelStyle], tp: int
) -> tuple[int, ...]:
    module, _, last = name.rpartition(".")
    style = styles.get(module)
    if style is None:
        return facts.shape
    if last != "weight":
        # A colwise linear layer's bias is split as its outputs are; a rowwise one's stays whole.
        return facts.shape if style == "rowwise" else (facts.shape[0] // tp, *facts.shape[1:])
    # Of an embedding, whose weight is [inputs, outputs], rows are inputs.
    first = (style == "rowwise") == facts.is_embedding
    rows, columns = facts.shape
    return (rows // tp, columns) if first else (rows, columns // tp)


def _dim(unit: ResolvedUnit, name: str, ndim: int) -> int | None:
    if ndim == 0:
        return None
    for chosen in unit.plan.shard_dims:
        if any(matches(chosen.parameter, _below(name, module)) for module in unit.names):
            if not -ndim <= chosen.dim < ndim:
                raise PlanError(f"shard_dims: {name!r} has {ndim} dims: no dim {chosen.dim}.")
            return chosen.dim % ndim
    return 0


def _below(name: str, module: str) -> str:
    return name.removeprefix(f"{module}.") if module else name


def _smaller(unit: ResolvedUnit, slicing: Slicing) -> Slicing | None:
    ranks = unit.plan.reshard_after_forward
    if ranks is None or isinstance(ranks, bool) or ranks in (1, slicing.parts):
        return None
    if ranks < 1 or slicing.parts % ranks:
        raise PlanError(
            f"reshard_after_forward is {ranks} for {list(unit.names)}, which does not divide "
            f"dp_shard, {slicing.parts}."
        )
    return _cut(slicing.shape, None if slicing.dim is None else 0, ranks)


def _reshards(unit: ResolvedUnit) -> bool:
    wanted = unit.plan.reshard_after_forward
    if wanted is None:
        return not unit.is_root
    return wanted if isinstance(wanted, bool) else wanted != 1


def _prefetch(
    unit: ResolvedUnit, index: int, line: Sequence[int]
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    depth = unit.plan.prefetch
    if depth is None or unit.is_root:
        return None, None
    place = line.index(index)
    # None at the ends of the line: without followers the engine predicts, as `apply_plan` has it.
    after = tuple(line[place + 1 : place + 1 + depth])
    before = tuple(line[max(place - depth, 0) : place][::-1])
    return after or None, before or None


@dataclass(frozen=True)
class Placement:
    """Where and over how many ranks a model is sharded.

    Attributes:
        shards: Ranks that share a parameter.
        replicas: Ranks that hold the same slice.
        is_host: Whether models compute on the host, so that offloading moves nothing.
        has_gloo: Whether gloo communicates, which has memory of its own while it does.
        shard_rank: The rank's place among those that share a parameter.
        splits: Whether matrices are split between ranks besides.
    """

    shards: int
    replicas: int
    is_host: bool
    splits: bool = False
    has_gloo: bool = False
    shard_rank: int = 0

    def is_local(self, share: UnitShare) -> bool:
        """Whether a rank's slices of a unit are its whole parameters."""
        is_alone = self.shards == 1 and not self.splits
        return is_alone and not share.unit.plan.offload and all(p.slicing.leads for p in share.own)
