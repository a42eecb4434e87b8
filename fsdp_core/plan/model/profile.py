"""What was measured of a model without running it: its parameters, and memory through a step.

The measurement follows one step of the whole, unsharded model and cuts it into segments, at the
places where a unit could gather, free or reduce. Between two such places memory does not depend
on the plan. So one profile serves every plan whose units are among its `stops`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fsdp_core.errors import PlanError
from fsdp_core.plan.model.growth import Growth, Highest
from fsdp_core.plan.model.sharding import Precision
from fsdp_core.plan.model.step_time import PassTimes

PROFILE_VERSION = 1

Boundary = Literal[
    "start",
    "forward",
    "forward_end",
    "again",
    "again_end",
    "backward",
    "backward_end",
    "loss",
    "loss_backward",
]
UnitKind = Literal["block", "embedding", "head", "other"]


@dataclass(frozen=True)
class ParameterFacts:
    """A parameter.

    Attributes:
        name: Its first name from the root.
        shape: Of the whole.
        dtype: As PyTorch names it, such as ``float32``.
        itemsize: Bytes of an element.
        is_floating: Whether a plan's `param_dtype` applies to it.
        requires_grad: Whether it is trained.
        is_embedding: Whether it is the weight of an `nn.Embedding`: rows are inputs.
        also: Its other names, if it is tied.
        is_written: Whether a forward writes it, as that of an `nn.Embedding` with `max_norm`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    is_floating: bool
    requires_grad: bool
    is_embedding: bool = False
    also: tuple[str, ...] = ()
    is_written: bool = False


@dataclass(frozen=True)
class BufferFacts:
    """A buffer, which every rank holds whole.

    Attributes:
        name: Its name from the root.
        nbytes: Its memory.
    """

    name: str
    nbytes: int


@dataclass(frozen=True)
class UnitFacts:
    """A module that suits as a unit. Amounts are bytes of the unsharded model, but `flops`.

    Attributes:
        module: Its name from the root.
        kind: A repeated block, or what stands apart from these.
        saved: What forward saves for backward: tensors that are no parameters, nor views of
            them, each counted for the unit that saves it first.
        forward_peak: Most that exists in forward over what was there before.
        backward_peak: The same in backward, its parameters' gradients included.
        outputs: What forward returns.
        flops: Floating-point operations of forward and backward.
    """

    module: str
    kind: UnitKind
    saved: Growth
    forward_peak: Highest
    backward_peak: Highest
    outputs: Growth
    flops: Growth


@dataclass(frozen=True)
class Segment:
    """A stretch of a step between two boundaries.

    Attributes:
        begins: What happens at its start: a module's forward or backward begins or has ended, or
            its forward runs again within backward, since the model recomputes by itself.
        module: Whose; "" also where no module is meant.
        peak: Most activation bytes within it over those at its start; gradients of parameters
            count here until its end.
        change: Activation bytes at its end minus those at its start, without such gradients.
        grads: Places, in the profile's list, of parameters whose gradients became known.
        within: As `peak`, with what operators take within themselves, while such are at work that
            take anything; None: there are none.
    """

    begins: Boundary
    module: str
    peak: Highest
    change: Growth
    grads: tuple[int, ...] = ()
    within: Highest | None = None


@dataclass(frozen=True)
class Conditions:
    """Under which a step was followed.

    Attributes:
        param_dtype: To which parameters and inputs of units are cast; None: not at all.
        output_dtype: To which the root's outputs are cast.
        recompute: Whether each stop but the root computes its activations again in backward.
        tp: Ranks over which matrices are split.
    """

    param_dtype: Precision | None = None
    output_dtype: Precision | None = None
    recompute: bool = False
    tp: int = 1


@dataclass(frozen=True)
class Trace:
    """A step under some conditions.

    Attributes:
        conditions: These.
        segments: In order; those of all traces begin alike.
        tp_bytes: What a rank sends for the split matrices in forward and backward.
        operators: How many run in forward and backward.
    """

    conditions: Conditions
    segments: tuple[Segment, ...]
    tp_bytes: Growth
    operators: Growth = field(default=Growth(0, 0))


@dataclass(frozen=True)
class ModelProfile:
    """A model as its plans need to know it.

    Attributes:
        device_type: Whose memory is meant.
        modules: Names of all modules, "" first, in the model's order.
        stops: Modules at whose boundaries segments are cut; the root is always one.
        parameters: Each once, in the model's order.
        buffers: Each once.
        units: Modules that suit as units, in the model's order; no two overlap.
        flops: Floating-point operations of forward and backward.
        traces: One for each of the conditions that were measured.
        granularity: Memory comes in multiples of so many bytes.
        smallest: Samples of the smallest micro-batch that the model takes.
        built_whole: Whether each rank builds the whole model, in the host's memory, before it is
            sharded.
        version: Of this schema.
        timed: Its passes, if they were run on real tensors and timed.
    """

    device_type: str
    modules: tuple[str, ...]
    stops: tuple[str, ...]
    parameters: tuple[ParameterFacts, ...]
    buffers: tuple[BufferFacts, ...]
    units: tuple[UnitFacts, ...]
    flops: Growth
    traces: tuple[Trace, ...]
    granularity: int = 1
    smallest: int = 1
    built_whole: bool = False
    version: int = PROFILE_VERSION
    timed: PassTimes | None = None

    def __post_init__(self) -> None:
        if self.version != PROFILE_VERSION:
            raise PlanError(
                f"This profile has version {self.version}, and this engine reads "
                f"{PROFILE_VERSION}; profile the model again."
            )

    def trace(self, conditions: Conditions) -> Trace:
        """The step under `conditions`.

        Raises:
            PlanError: It was not measured.
        """
        for trace in self.traces:
            if trace.conditions == conditions:
                return trace
        raise PlanError(
            f"The profile holds no step with {conditions}, only with "
            f"{[trace.conditions for trace in self.traces]}; profile the model with it."
        )

    def rounded(self, nbytes: int) -> int:
        """Memory that a tensor of `nbytes` takes."""
        return -(-nbytes // self.granularity) * self.granularity
