"""What operators allocate within themselves, found by running them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from fsdp_core.plan import fakes
from fsdp_core.plan.allocator_peak import AllocatorPeak, allocator_peak

if TYPE_CHECKING:
    from torch._ops import OpOverload

# Kernels that reorder, widen or copy what they are given, by how their names begin. All others
# were seen to take less than a page on a CPU.
_BEGINNINGS: Final = (
    *("convolution", "cudnn_conv", "miopen_conv", "slow_conv", "_slow_conv"),
    *("mkldnn_rnn", "_cudnn_rnn", "miopen_rnn"),
    *("native_batch_norm", "cudnn_batch_norm", "batch_norm_backward", "_native_batch_norm"),
    *("native_layer_norm_backward", "native_group_norm_backward"),
    *("_adaptive_avg_pool", "avg_pool", "max_pool", "upsample_", "_upsample_", "grid_sampler"),
    *("im2col", "col2im", "pixel_unshuffle", "logsumexp", "_euclidean_dist"),
    *("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_safe_softmax"),
    *("_thnn_fused", "_cdist", "_ctc_loss"),
)
# In narrow dtypes a processor's widen or reorder as well.
_WIDENING: Final = ("mm.", "addmm.", "bmm.", "baddbmm.", "sum.", "mean.", "scatter", "gather.")
_NARROW: Final = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class _Bounds:
    """Of what is run: bytes and operations of one operator, operations of all."""

    nbytes: int
    flops: int
    flops_in_all: int


_BOUNDS: Final = {"cpu": _Bounds(1 << 29, 5 * 10**10, 2 * 10**11)}
_OF_DEVICES: Final = _Bounds(1 << 33, 5 * 10**13, 2 * 10**14)
# Some kernels of a host do a billion operations in a second: a tenth may take 20 s.
_CHEAP: Final = 0.1


@dataclass(frozen=True)
class _Found:
    """Bytes that were needed beside inputs and outputs, and what the outputs look like."""

    extra: int
    outputs: tuple[torch.Size, ...] | None = None


class Workspaces:
    """Runs each operator of some kinds once for each signature, on tensors of zeros.

    What is too large to be run is taken to need as much as its inputs and outputs on a host, and
    nothing on a device, whose kernels rarely copy.

    Attributes:
        has_resized: Whether outputs were replaced; see `look`.
        has_assumed: Whether something was too large to be run.
    """

    # True of the process: kernels of a device differ between machines, not between models.
    _known: Final[dict[tuple[object, ...], _Found]] = {}

    def __init__(self, device_type: str, measure: AllocatorPeak | None) -> None:
        """Has run nothing yet.

        Args:
            device_type: On which operators run.
            measure: Of its allocator; None: nothing is measured.
        """
        self.has_resized = False
        self.has_assumed = False
        self._device_type = device_type
        self._measure = measure
        self._bounds = _BOUNDS.get(device_type, _OF_DEVICES)
        self._flops_left = self._bounds.flops_in_all
        self._flops_of: dict[tuple[object, ...], int] = {}
        self._wanted: dict[object, tuple[bool, bool]] = {}

    @classmethod
    def on(cls, device_type: str) -> Workspaces:
        """For a type of device."""
        return cls(device_type, allocator_peak(device_type))

    @property
    def was_cheap(self) -> bool:
        """Whether a small part of the operations that may be run was enough for all signatures."""
        return sum(self._flops_of.values()) <= _CHEAP * self._bounds.flops_in_all

    def look(
        self,
        func: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: Any,  # noqa: ANN401 - what operators return
    ) -> tuple[Any, int | None]:
        """What an operator needs that was called on tensors without memory.

        Args:
            func: The operator.
            args: As it was called.
            kwargs: The same.
            result: What it returned. PyTorch's rules for tensors without memory give some outputs
                no elements that have some: what recurrent kernels keep for backward.

        Returns:
            `result`, such outputs replaced, and bytes; None: it is none of the kinds.
        """
        measure = self._measure
        if measure is None or not self._is_wanted(func, args):
            return result, None
        tensors = [t for t in pytree.tree_leaves((args, kwargs, result)) if _is_tensor(t)]
        key = (func, self._device_type, torch.get_num_threads(), *_described((args, kwargs)))
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        unknown = nbytes if self._device_type == "cpu" else 0
        if not all(t.numel() for t in pytree.tree_leaves((args, kwargs)) if _is_tensor(t)):
            # A kernel may read without a look at the size what it expects from another one.
            return result, unknown
        flops = _flops(func, args, kwargs, result)
        self._flops_left -= flops
        self._flops_of[key] = flops
        found = self._known.get(key)
        if found is None:
            bounds = self._bounds
            is_small = nbytes <= bounds.nbytes and flops <= bounds.flops
            if is_small and self._flops_left >= 0 and measure.has_room(nbytes):
                found = self._run(measure, func, args, kwargs)
            if found is not None:
                self._known[key] = found
        if found is None:
            self.has_assumed = True
            return result, unknown
        sized = _with_sizes(result, found.outputs)
        self.has_resized = self.has_resized or sized is not result
        return sized, found.extra

    def _is_wanted(self, func: OpOverload, args: Sequence[object]) -> bool:
        kinds = self._wanted.get(func)
        if kinds is None:
            space, _, name = str(func).partition(".")
            is_aten = space == "aten"
            kinds = (
                is_aten and name.startswith(_BEGINNINGS),
                is_aten and name.startswith(_WIDENING),
            )
            self._wanted[func] = kinds
        always, if_narrow = kinds
        return always or (
            if_narrow
            and self._device_type == "cpu"
            and any(isinstance(each, torch.Tensor) and each.dtype in _NARROW for each in args)
        )

    def _run(
        self,
        measure: AllocatorPeak,
        func: OpOverload,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> _Found | None:
        """None if it cannot be run: there is no room, or zeros are no input for it."""
        device = torch.device(self._device_type)

        def real(value: object) -> object:
            return _zeros(value, device) if isinstance(value, torch.Tensor) else value

        with fakes.with_memory():
            try:
                given, named = pytree.tree_map(real, (tuple(args), dict(kwargs)))
                measure.begin()
                outputs = func(*given, **named)
                extra = max(measure.most() - max(measure.held(), 0), 0)
            except (RuntimeError, MemoryError, IndexError):
                return None
            finally:
                measure.end()
            leaves = [leaf for leaf in pytree.tree_leaves(outputs) if _is_tensor(leaf)]
        return _Found(extra, tuple(leaf.shape for leaf in leaves))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _zeros(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return there.zero_()


def _described(value: object) -> list[object]:
    """All of a signature that a kernel could depend on, but for values in tensors."""
    leaves, tree = pytree.tree_flatten(value)
    return [
        str(tree),
        *(
            (leaf.shape, leaf.stride(), leaf.dtype)
            if isinstance(leaf, torch.Tensor)
            else (type(leaf), leaf)
            for leaf in leaves
        ),
    ]


def _flops(
    func: OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    result: object,
) -> int:
    counted: Callable[..., int] | None = flop_registry.get(func.overloadpacket)
    return 0 if counted is None else int(counted(*args, **kwargs, out_val=result))


def _with_sizes(result: Any, sizes: tuple[torch.Size, ...] | None) -> Any:  # noqa: ANN401 - as above
    leaves, tree = pytree.tree_flatten(result)
    tensors = [leaf for leaf in leaves if _is_tensor(leaf)]
    if sizes is None or len(tensors) != len(sizes):
        return result
    if all(tensor.numel() or not size.numel() for tensor, size in zip(tensors, sizes, strict=True)):
        return result
    wanted = iter(sizes)

    def with_size(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        size = next(wanted)
        return leaf if leaf.numel() or not size.numel() else leaf.new_empty(size)

    return pytree.tree_unflatten([with_size(leaf) for leaf in leaves], tree)
