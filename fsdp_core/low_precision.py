"""Parameters that are updated in full precision and gathered as one byte an element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, SupportsIndex

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.comm import DEFAULT_BLOCK_SIZE, SCALE_DTYPE, BlockCode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp_core.policy import MixedPrecisionPolicy

Chooser = Callable[[str, nn.Parameter], bool]

_MANY = 4096

_aten = torch.ops.aten

# What sharding, moving and loading do to a parameter. The result is a weight of the same kind;
# that of any other operation, such as an optimizer's state, is an ordinary tensor.
_KEEPING = frozenset(
    {
        _aten.alias.default,
        _aten.as_strided.default,
        _aten.clone.default,
        _aten.detach.default,
        _aten.empty_like.default,
        _aten.new_zeros.default,
        _aten.permute.default,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.view.default,
        *torch_private.MOVES,
    }
)


@dataclass(frozen=True)
class _Sent:
    """What is needed to read what all ranks have sent.

    Attributes:
        shape: Of one rank's padded slice.
    """

    shape: tuple[int, ...]


class LowPrecisionWeight(torch.Tensor):
    """Wraps a tensor, so that `fully_shard` gathers it as one-byte codes with scales.

    The wrapped tensor is the parameter: the optimizer updates it, checkpoints hold it, in its own
    dtype. Before a gather each rank quantises its slice, and afterwards the whole is decoded into
    the dtype of computation, which adds that dtype's rounding. Gradients are as usual.

    A slice is quantised in blocks of consecutive elements, in the order of its dims; see
    `BlockCode` for how far the decoded values are from the wrapped ones. An element costs
    1 + 4 / `block_size` bytes of traffic.

    Pickling gives an ordinary tensor of full precision, so that files can be read anywhere.

    Attributes:
        full: The wrapped tensor.
        code: How it is quantised.
    """

    full: torch.Tensor
    code: BlockCode

    __torch_function__ = torch_private.no_torch_function  # type: ignore[assignment]  # as PyTorch documents it

    @staticmethod
    def code_of(block_size: int) -> BlockCode:
        """How this kind of weight is quantised."""
        raise NotImplementedError

    def __new__(cls, full: torch.Tensor, block_size: int = DEFAULT_BLOCK_SIZE) -> Self:
        """Wraps `full`, which is floating point, to be quantised in blocks of `block_size`."""
        made: Self = torch_private.wrapper_of(cls, full)
        made.full = full
        made.code = cls.code_of(block_size)
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # PyTorch's is untyped
        del tensor_contents
        return f"{type(self).__name__}({self.full!r}, block_size={self.code.block_size})"

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        reduced: str | tuple[object, ...] = self.full.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # PyTorch's
        return reduced

    def __tensor_flatten__(self) -> tuple[list[str], int]:
        """The names of wrapped tensors, and what else it takes to wrap them again."""
        return ["full"], self.code.block_size

    @classmethod
    def __tensor_unflatten__(
        cls,
        inner: Mapping[str, torch.Tensor],
        block_size: int,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
    ) -> Self:
        """Undoes `__tensor_flatten__`."""
        del outer_size, outer_stride
        return cls(inner["full"], block_size)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's has a placeholder here
        cls,
        func: torch_private.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Computes with the wrapped tensors."""
        del types
        given = dict(kwargs or {})
        plain_args, plain_kwargs = torch_private.tree_map_only(
            LowPrecisionWeight, lambda weight: weight.full, (args, given)
        )
        result = func(*plain_args, **plain_kwargs)
        if isinstance(result, torch.Tensor) and torch_private.writes_first_argument(func):
            return args[0]
        if "out" in given:
            return given["out"]
        first = args[0] if args else None
        if func in _KEEPING and isinstance(first, LowPrecisionWeight):
            kind, block_size = type(first), first.code.block_size
            return torch_private.tree_map_only(
                torch.Tensor, lambda tensor: kind(tensor, block_size), result
            )
        return result

    # -- The protocol of the gather

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], _Sent]:
        """This rank's codes, of its padded slice's shape, and its scales, 1D."""
        del outer_stride, module, mp_policy
        padded = _padded(self.full.detach(), outer_size, mesh.size())
        codes = torch.empty_like(padded, dtype=self.code.dtype)
        scales = padded.new_empty(self.code.scales_for(padded.numel()), dtype=SCALE_DTYPE)
        self.code.encode(padded.view(1, -1), codes.view(1, -1), scales.view(1, -1))
        return (codes, scales), _Sent(tuple(padded.shape))

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, torch.Tensor],
        metadata: _Sent,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor]] | None:
        """The whole in `param_dtype`; the slices' padding is at its end.

        The memory of the received tensors is freed at once.
        """
        codes, scales = all_gather_outputs
        if out is None:
            with torch_private.outside_inference_mode():
                # Made once and used by every later pass.
                whole = torch.empty(codes.shape, dtype=param_dtype, device=codes.device)
        else:
            local = torch_private.local_tensor(out) if isinstance(out, DTensor) else out
            # `out` is what was returned at first, without the padding, which has its memory.
            whole = local.detach().as_strided(codes.shape, _strides(codes.shape), 0)
        self._decode(codes, scales, metadata, whole)
        for arrived in all_gather_outputs:
            arrived.untyped_storage().resize_(0)
        return (whole, (whole,)) if out is None else None

    def _decode(
        self, codes: torch.Tensor, scales: torch.Tensor, sent: _Sent, whole: torch.Tensor
    ) -> None:
        parts = codes.numel() // math.prod(sent.shape)
        by_part = scales.view(parts, -1)
        dim = _differing(codes.shape, sent.shape)
        if dim == 0:
            self.code.decode(codes.view(parts, -1), by_part, whole.view(parts, -1))
            return
        # Slices lie beside each other, and blocks do not cross from one to the next.
        rows = torch.unflatten(codes, dim, (parts, -1)).movedim(dim, 0)
        decoded = torch.empty(rows.shape, dtype=whole.dtype, device=whole.device)
        self.code.decode(rows.reshape(parts, -1), by_part, decoded.view(parts, -1))
        torch.unflatten(whole, dim, (parts, -1)).copy_(decoded.movedim(0, dim))


class Int8Weight(LowPrecisionWeight):
    """Gathered as int8: each value within max|block| / 254 of the wrapped one."""

    @staticmethod
    def code_of(block_size: int) -> BlockCode:
        """Integers."""
        return BlockCode.int8(block_size)


class Float8Weight(LowPrecisionWeight):
    """Gathered as float8_e4m3fn: small values of a block are more precise than with int8.

    Each value x is within the larger of |x| / 16 and max|block| / 458752 of the wrapped one.
    """

    @staticmethod
    def code_of(block_size: int) -> BlockCode:
        """Floating-point numbers."""
        return BlockCode.float8(block_size)


def full_precision(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a `LowPrecisionWeight` wraps; any other as it is."""
    return tensor.full if isinstance(tensor, LowPrecisionWeight) else tensor


def _padded(local: torch.Tensor, whole: Sequence[int], parts: int) -> torch.Tensor:
    # Slices are equal but for the dim they are cut on, and the first of them is the largest.
    dim = _differing(whole, local.shape)
    wanted = list(local.shape)
    wanted[dim] = whole[dim] if local.size(dim) == whole[dim] else -(-whole[dim] // parts)
    if wanted == list(local.shape):
        return local.contiguous()
    padded = local.new_zeros(wanted)
    padded.narrow(dim, 0, local.size(dim)).copy_(local)
    return padded


def _differing(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=True))
    return next((dim for dim, (a, b) in pairs if a != b), 0)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def is_large_matrix(fqn: str, param: nn.Parameter) -> bool:
    """Whether a parameter has two dims or more and at least 4096 elements.

    Biases and norms have little traffic, and need the precision.
    """
    del fqn
    return param.ndim > 1 and param.numel() >= _MANY


def gather_in_low_precision(
    module: nn.Module,
    kind: type[LowPrecisionWeight] = Int8Weight,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    chooses: Chooser = is_large_matrix,
) -> list[str]:
    """Makes `fully_shard` gather parameters of `module` as one-byte codes.

    Call it before `fully_shard` and before the optimizer is built: plain parameters are replaced
    (tied ones once). Those that are DTensors keep their identity. What is not floating point,
    not contiguous, or of low precision already is left alone.

    Not with a number of ranks as `reshard_after_forward`.

    Args:
        module: On any device, meta included.
        kind: `Int8Weight` or `Float8Weight`.
        block_size: Elements that share a scale; see `BlockCode` for the precision.
        chooses: Takes a parameter and its name below `module`.

    Returns:
        Names of the parameters chosen, tied ones under each name.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    chosen = []
    for prefix, owner in module.named_modules():
        for name, param in torch_private.own_parameters(owner):
            fqn = f"{prefix}.{name}" if prefix else name
            if param not in replaced and _can_be(param) and chooses(fqn, param):
                replaced[param] = _wrapped(param, kind, block_size)
            if param in replaced:
                torch_private.set_parameter(owner, name, replaced[param])
                chosen.append(fqn)
    return chosen


def _can_be(param: nn.Parameter) -> bool:
    local = torch_private.local_tensor(param) if isinstance(param, DTensor) else param
    return (
        local.is_floating_point()
        and local.is_contiguous()
        and not isinstance(local, LowPrecisionWeight)
    )


def _wrapped(param: nn.Parameter, kind: type[LowPrecisionWeight], block_size: int) -> nn.Parameter:
    with torch.no_grad():
        if isinstance(param, DTensor):
            local = torch_private.local_tensor(param)
            torch_private.replace_local(param, kind(local, block_size))
            return param
        return nn.Parameter(kind(param.detach(), block_size), requires_grad=param.requires_grad)
