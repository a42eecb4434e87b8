"""Where a parameter is registered, what the engine notes on it, and what may take its place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core import torch_private
from fsdp_core.errors import ArgumentError, ArgumentTypeError, StateError, TensorKindError


@dataclass(frozen=True)
class ParamSlot:
    """All (module, name) places of one parameter; more than one if it is tied.

    Attributes:
        places: The first is where changes by the user are read from.
        fqn: Name below the unit's first module, for messages.
    """

    places: tuple[tuple[nn.Module, str], ...]
    fqn: str

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules concerned, each once."""
        return tuple(dict.fromkeys(module for module, _ in self.places))

    def joined(self, other: ParamSlot) -> ParamSlot:
        """With the places of `other` behind this one's."""
        return ParamSlot((*self.places, *other.places), self.fqn)

    def registered(self) -> nn.Parameter:
        """What is registered at the first place now.

        Raises:
            ArgumentTypeError: Nothing is, or a tensor that is no `nn.Parameter`.
        """
        found = torch_private.parameter_at(*self.places[0])
        if not isinstance(found, nn.Parameter):
            what = "is registered no more" if found is None else "was replaced by a plain tensor"
            raise ArgumentTypeError(
                f"Parameter {self.fqn!r} {what}. Parametrize, prune or remove parameters before "
                "fully_shard; call forward once before torch.func.functional_call, and give it the "
                "model's own parameters."
            )
        return found

    def holds(self, *parameters: nn.Parameter) -> bool:
        """Whether one of `parameters` is what is registered at each place."""
        there = (torch_private.parameter_at(module, name) for module, name in self.places)
        return all(any(each is one for one in parameters) for each in there)

    def register(self, parameter: nn.Parameter) -> None:
        """Registers `parameter` at every place."""
        for module, name in self.places:
            torch_private.set_parameter(module, name, parameter)


def find_slots(parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module]) -> list[ParamSlot]:
    """The slot of each parameter within the trees of `modules`, in the order given.

    Raises:
        ArgumentError: A parameter is registered nowhere in the trees.
    """
    places: dict[nn.Parameter, dict[tuple[nn.Module, str], str]] = {p: {} for p in parameters}
    for root in modules:
        for prefix, module in root.named_modules(remove_duplicate=False):
            for name, parameter in torch_private.own_parameters(module):
                if parameter in places:
                    fqn = f"{prefix}.{name}" if prefix else name
                    places[parameter].setdefault((module, name), fqn)
    if any(not found for found in places.values()):
        raise ArgumentError(f"Some parameters are not in the module trees of {tuple(modules)}.")
    return [ParamSlot(tuple(found), next(iter(found.values()))) for found in places.values()]


class Attachment:
    """Base of such a note, of which a parameter has at most one of each kind.

    It is an attribute of the parameter: a weak reference would forbid PyTorch to swap the tensor, and
    another tensor could get the same id later. It is not copied or saved with the parameter: in its place
    is an empty `OrderedDict`, which `torch.load` accepts under `weights_only=True`.
    """

    def __reduce__(self) -> tuple[type[OrderedDict[str, object]], tuple[()]]:
        return OrderedDict, ()


Kind = TypeVar("Kind", bound=Attachment)


def attach(parameter: torch.Tensor, note: Attachment) -> None:
    """Sets `note` as an attribute of the parameter; it replaces an older one of its kind."""
    parameter.__dict__[_name(type(note))] = note


def attached(parameter: torch.Tensor, kind: type[Kind]) -> Kind | None:
    """The parameter's note of this kind; None if it has none."""
    found = parameter.__dict__.get(_name(kind))
    return found if isinstance(found, kind) else None


def inherit(old: torch.Tensor, new: torch.Tensor) -> None:
    """Copies the notes of `old` to `new`, which replaces it."""
    for note in list(old.__dict__.values()):
        if isinstance(note, Attachment):
            attach(new, note)


def _name(kind: type[Attachment]) -> str:
    return f"_fsdp_core_{kind.__name__}"


def check_replacement(
    fqn: str,
    registered: nn.Parameter,
    spec: torch_private.Spec,
    held_shapes: Sequence[tuple[int, ...]],
) -> torch_private.Spec:
    """Checks what is registered on the module, and returns how it lies.

    Args:
        fqn: The parameter's name.
        registered: What is registered there.
        spec: How the sharded parameter lay before.
        held_shapes: Those that this rank's local tensor may have; the usual one first.

    Raises:
        ArgumentTypeError: It is no DTensor.
        ArgumentError: Its shape is another, or this rank holds another part of it.
    """
    if not isinstance(registered, DTensor):
        raise ArgumentTypeError(
            f"Parameter {fqn!r} was replaced by a {type(registered).__name__}, but a "
            "sharded parameter must be a DTensor. Assign a DTensor with the placements of "
            "the old one, for example from distribute_tensor."
        )
    held = tuple(torch_private.local_tensor(registered).shape)
    if registered.shape != torch.Size(spec.shape) or held not in held_shapes:
        raise ArgumentError(
            f"Parameter {fqn!r} of shape {tuple(spec.shape)} was replaced by a DTensor of shape "
            f"{tuple(registered.shape)} with placements {registered.placements}, of which this "
            f"rank holds {held} and should hold {held_shapes[0]}. Assign one of the old shape, "
            f"with placements {spec.placements} on {spec.mesh}; redistribute brings it there."
        )
    return torch_private.spec_of(registered)


def replaced_unseen(fqn: str) -> StateError:
    """The refusal to compute with another parameter than the one that the user has registered."""
    return StateError(
        f"Parameter {fqn!r} was replaced on its module since the first forward, by assignment or by "
        "torch.func.functional_call. The module would compute with the old one all the same. Copy "
        "the values into the sharded parameter, or load them: load_state_dict(..., assign=True)."
    )


def check_dense(fqn: str, grad: torch.Tensor) -> None:
    """Checks that a whole gradient can be cut into rows.

    Raises:
        TensorKindError: It is sparse.
    """
    if grad.layout is not torch.strided:
        raise TensorKindError(
            f"The gradient of parameter {fqn!r} is sparse ({grad.layout}), and a reduction takes "
            "dense ones only. Construct the embedding with sparse=False."
        )


def check_grad(fqn: str, total: torch.Tensor, local: torch.Tensor) -> None:
    """Checks that a reduced slice can be added to a gradient.

    Args:
        fqn: The parameter's name.
        total: Its gradient.
        local: The slice, of the shape of the parameter's local tensor.

    Raises:
        TensorKindError: The gradient is no DTensor, or lies otherwise.
    """
    if not isinstance(total, DTensor) or torch_private.local_tensor(total).shape != local.shape:
        raise TensorKindError(
            f"The gradient of parameter {fqn!r} was set to a {type(total).__name__} of which this "
            "rank does not hold the same slice as of the parameter. Set a DTensor of the "
            "parameter's placements, or None."
        )
