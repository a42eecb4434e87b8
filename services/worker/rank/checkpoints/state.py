"""All that a run is after a step, as tensors and text: what a checkpoint holds of one rank.

Tensors of the model, of its averages and of the optimizers are boxes of whole tensors, which the boxes of
all ranks tile, so a run of another number of ranks can be filled from them. Random states belong to a
rank. Beside them there is what a user's ``Trainable`` has for a state, the scale of losses, and where the
run is in its data, which is the same on all ranks, whatever their number. Nothing else is state: schedule
and seeds follow from the step and the spec.

Of several optimizers each has parameters of its own, so their states are named as those of one.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint import (
    SavedShard,
    ShardEntry,
    fill_from_shards,
    load_model_state,
    load_optimizer_state,
    local_shards,
    model_state,
    optimizer_state,
)
from services.worker.rank.checkpoints import own_tensors
from services.worker.rank.checkpoints.beside import flattened, restored
from services.worker.rank.checkpoints.gradients import load_gradients, pending_gradients
from services.worker.rank.checkpoints.random_state import (
    random_tensors,
    random_text,
    restore_random,
    seed_random,
)
from services.worker.rank.data.source import BEGINNING, Feed
from services.worker.rank.gang.groups import Gang
from services.worker.rank.optim.ema import PREFIX as EMA
from services.worker.rank.optim.ema import Ema
from services.worker.rank.optim.loss_scale import LossScaler
from services.worker.rank.optim.own_values import (
    Values,
    changed,
    number_keys,
    put_back,
    put_rates_back,
    rates,
    refuse_hidden_state,
)
from services.worker.rank.optim.several import parameters_of
from services.worker.rank.seeds import derive

MODEL: Final = "model."
OPTIMIZER: Final = "optim."
_KEY: Final = "meshloom"
_VERSION: Final = 1
FILE: Final = "file."
"""Begins the names of tensors that hold a file's bytes; an export writes these files."""


class Reader(Protocol):
    """Has what one rank saved, as ``ShardReader`` does."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The text beside the tensors."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor."""
        ...

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, one slice a dim."""
        ...


class Told(Protocol):
    """Has a state that JSON has words for, the same on all ranks."""

    def state(self) -> Mapping[str, Any]:
        """The state."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes it back."""
        ...


class Stateful(Protocol):
    """Has a state of dicts and lists of tensors and of what JSON has words for."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes it back."""
        ...


@dataclass(frozen=True)
class TrainedParts:
    """What changes as a run trains, and where.

    Attributes:
        model: Sharded; of several models a container.
        optimizers: Over disjoint parameters of it.
        gang: The ranks.
        data_digest: Names the data.
        seed: The job's.
        beside: What else a checkpoint holds.
        ema: Averages of the parameters.
        scaler: The scale of losses.
        files: What belongs beside the exported weights, by plain file name; rank 0 saves it.
        data: Where it is in the data; None: the step says it.
        early_stop: How its evaluations went, where they decide on its end.
        first_values: The own values of each optimizer as it was made.
        is_changed_by_user: Whether code that may change any of it runs between two updates.
        first_rates: What the groups of each optimizer were made with, where that code may set them and step.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    gang: Gang
    data_digest: str
    seed: int
    beside: Stateful | None = None
    ema: Ema | None = None
    scaler: LossScaler | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    data: Feed | None = None
    early_stop: Told | None = None
    first_values: Sequence[Values] = ()
    is_changed_by_user: bool = False
    first_rates: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class TrainingState:
    """What one rank saves.

    Attributes:
        step: Steps that were made.
        loss: Of the last of them; None before the first.
        tensors: By name, where they are: the next step changes them.
        text: The boxes and the random states that are no tensors, as safetensors metadata.
        lasting: Those that nothing but the optimizer's step changes, with what they are the local part of.
        evaluation: The validation loss after the step and metrics; empty if there was no pass.
    """

    step: int
    loss: float | None
    tensors: Mapping[str, torch.Tensor]
    text: Mapping[str, str]
    lasting: Mapping[str, torch.Tensor] = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)


def capture(
    parts: TrainedParts,
    step: int,
    loss: float | None,
    evaluation: Mapping[str, float] | None = None,
    *,
    whole_everywhere: bool = False,
) -> TrainingState:
    """The state of ``parts`` after ``step`` steps on this rank, and how it was evaluated then.

    ``whole_everywhere``: it has all that a rank of this place needs, also what a checkpoint has of
    another rank.
    """
    refuse_hidden_state(parts.optimizers)
    model = model_state(parts.model)
    changed_by_update = {
        name: tensor
        for each in parts.optimizers
        for name, tensor in optimizer_state(parts.model, each).items()
    } | dict({} if parts.ema is None else parts.ema.tensors)
    beside = flattened({} if parts.beside is None else parts.beside.state_dict())
    state = {**model, **changed_by_update, **pending_gradients(parts.model), **beside.tensors}
    entries = local_shards(state, parts.gang.mesh, all_save=whole_everywhere)
    tensors = {entry.fqn: entry.tensor for entry in entries}
    tensors |= random_tensors(parts.gang.device)
    own: dict[str, torch.Tensor] = {}
    if parts.gang.compares and not whole_everywhere:
        names = own_tensors.differing(state, parts.gang)
        own = {name: state[name].detach().contiguous() for name in names if state[name].numel()}
    if parts.gang.rank != 0:
        tensors |= {own_tensors.PREFIX + name: each for name, each in own.items()}
    else:
        tensors |= {
            FILE + name: torch.frombuffer(bytearray(content), dtype=torch.uint8)
            for name, content in parts.files.items()
            if content
        }
    about = {
        "step": step,
        "rank": parts.gang.rank,
        "world_size": parts.gang.world_size,
        "mesh": _axes(parts),
        "data_digest": parts.data_digest,
        "data": {} if parts.data is None else dict(parts.data.state()),
        "boxes": boxes_of(entries),
        **random_text(),
    }
    if parts.gang.compares and not whole_everywhere:
        about["own"] = {name: tuple(each.shape) for name, each in own.items()}
    if told := _of_optimizers(parts):
        about["optimizers"] = told
    if beside.document:
        about["beside"] = beside.document
    if parts.scaler is not None:
        about["scaler"] = parts.scaler.state()
    if parts.early_stop is not None:
        about["early_stop"] = dict(parts.early_stop.state())
    lasting: dict[str, torch.Tensor] = {}
    if not parts.is_changed_by_user:
        kept = _trained(parts, model) | changed_by_update
        inner = {name: name.removeprefix(own_tensors.PREFIX) for name in tensors}
        lasting = {name: kept[plain] for name, plain in inner.items() if plain in kept}
    return TrainingState(step, loss, tensors, as_text(about), lasting, evaluation or {})


def _trained(parts: TrainedParts, model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What an optimizer trains of the model.

    Modules compute with whole copies of sharded parameters. Anything else they may change in a forward
    pass: buffers, and parameters that are trained otherwise, as those of a teacher.
    """
    held = {each for optimizer in parts.optimizers for each in parameters_of(optimizer)}
    named = parts.model.named_parameters()
    names = {f"{MODEL}{name}" for name, each in named if each in held and each.requires_grad}
    return {n: each for n, each in model.items() if n in names and isinstance(each, DTensor)}


def restore(parts: TrainedParts, readers: Iterable[Reader]) -> None:
    """Fills the parts from the files of all ranks that saved.

    Args:
        parts: Freshly built.
        readers: One a saved rank. Values are read from those files only that hold something of
            this rank's.

    Raises:
        CheckpointError: The files do not hold what this model and optimizer need.
        ValueError: A file's text is not what ``capture`` wrote.
    """
    abouts = [(reader, about_of(reader)) for reader in readers]
    place = (parts.gang.rank, _axes(parts))
    same = next((each for each in abouts if (each[1]["rank"], each[1]["mesh"]) == place), None)
    shards = list(_shards_for(same, abouts))
    # Of a checkpoint of an older version, too, all have that of rank 0: the tensors in it are that rank's alone.
    told = same[1] if same is not None and "own" in same[1] else abouts[0][1]
    load_model_state(parts.model, shards)
    _load_optimizers(parts, shards, told.get("optimizers", ()))
    load_gradients(parts.model, shards)
    if parts.ema is not None:
        # A clone may begin to average with weights that were trained without.
        parts.ema.start_over()
        if any(shard.fqn.startswith(EMA) for shard in shards):
            fill_from_shards(parts.ema.tensors, shards)
    if parts.beside is not None and (saved := told.get("beside")):
        parts.beside.load_state_dict(restored(saved, shards, parts.beside.state_dict()))
    if parts.scaler is not None and (scale := abouts[0][1].get("scaler")):
        parts.scaler.restore(scale)
    if parts.early_stop is not None and (course := abouts[0][1].get("early_stop")):
        parts.early_stop.restore(course)
    step = abouts[0][1]["step"]
    if parts.data is not None:
        restore_position(parts.data, parts.data_digest, abouts[0][1])
    if same is not None:
        restore_random(parts.gang.device, *same)
        return
    # On another mesh no saved rank is this one. A seed of its own is as good as any, and the same
    # whenever the same checkpoint is resumed on this mesh.
    seed_random(derive(parts.seed, "rank", parts.gang.data_rank, "resumed at", step))


def _shards_for(
    same: tuple[Reader, Mapping[str, Any]] | None,
    abouts: Sequence[tuple[Reader, Mapping[str, Any]]],
) -> Iterator[SavedShard]:
    """What was saved for a rank, by the names of its state.

    Args:
        same: Of the rank that had its place on the same mesh; None where the mesh is another one.
        abouts: Of all that saved.

    Raises:
        CheckpointError: It can go on on that mesh alone.
    """
    differing = {name for _, about in abouts for name in about.get("own", ())}
    if same is None:
        own_tensors.refuse_elsewhere(differing, OPTIMIZER, abouts[0][1]["mesh"])
        differing = set()
    for reader, about in abouts:
        for shard in saved_shards(reader, about["boxes"]):
            if shard.fqn not in differing:
                yield shard
    if same is not None:
        reader, about = same
        yield from own_tensors.own_shards(reader, about.get("own", {}), is_first=about["rank"] == 0)


def restore_position(feed: Feed, digest: str, about: Mapping[str, Any]) -> None:
    """Goes to where the run was in its data: by the step, if an older version saved it.

    Args:
        feed: This rank's way through the data.
        digest: Of the data; a clone with other data than was saved begins it.
        about: The text of any rank that saved.
    """
    is_same = about.get("data_digest") == digest
    feed.restore(about.get("data", {}) if is_same else BEGINNING, about["step"])


def _load_optimizers(
    parts: TrainedParts, shards: Sequence[SavedShard], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Gives each optimizer what was saved of its parameters; the first what is nobody's, to refuse it."""
    first, *others = parts.optimizers
    parts.model.state_dict(keep_vars=True)  # its hooks hang the slices, which the optimizers hold
    names = {parameter: name for name, parameter in parts.model.named_parameters()}
    # One of another class than was saved may lack what it must not lack; those of torch make all in their first step.
    classes = [_class_of(each) for each in parts.optimizers]
    are_alike = [each["class"] for each in saved] == classes
    taken: set[str] = set()
    numbers = {key for about in saved for key in about.get("numbers", ())}

    def load(optimizer: torch.optim.Optimizer, mine: Sequence[SavedShard]) -> None:
        later = are_alike and not _is_torchs(_class_of(optimizer))
        load_optimizer_state(parts.model, optimizer, mine, later_keys=later, numbers=numbers)

    for optimizer in others:
        held = {f"{OPTIMIZER}{names[each]}" for each in parameters_of(optimizer) if each in names}
        mine = [shard for shard in shards if shard.fqn.rpartition(".")[0] in held]
        load(optimizer, mine)
        taken |= {shard.fqn for shard in mine}
    load(first, [each for each in shards if each.fqn not in taken])
    if are_alike:
        for optimizer, about in zip(parts.optimizers, saved, strict=True):
            put_back(optimizer, about["changed"])
            put_rates_back(optimizer, about.get("rates", ()))


def _of_optimizers(parts: TrainedParts) -> list[dict[str, Any]]:
    """Their classes and what they have of their own; nothing where they are torch's and have nothing."""
    told: list[dict[str, Any]] = [
        {
            "class": _class_of(optimizer),
            "changed": changed(optimizer, first),
            "numbers": number_keys(optimizer),
        }
        for optimizer, first in zip(parts.optimizers, parts.first_values, strict=True)
    ]
    for about, optimizer, first in zip(told, parts.optimizers, parts.first_rates, strict=False):
        if found := rates(optimizer, first):
            about["rates"] = found
    is_plain = all(
        _is_torchs(each["class"]) and not any(each["changed"]) and "rates" not in each
        for each in told
    )
    return [] if is_plain else told


def _is_torchs(name: str) -> bool:
    return name.startswith("torch.")


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _axes(parts: TrainedParts) -> dict[str, int]:
    mesh = parts.gang.mesh
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def boxes_of(entries: Iterable[ShardEntry]) -> dict[str, Any]:
    """Where the tensors of one file lie in the whole ones, as JSON."""
    return {
        entry.fqn: {
            "global_shape": entry.global_shape,
            "offsets": entry.offsets,
            "shape": tuple(entry.tensor.shape),
        }
        for entry in entries
    }


def as_text(about: Mapping[str, Any]) -> dict[str, str]:
    """What a file says beside its tensors, as the format's text."""
    return {_KEY: json.dumps({"version": _VERSION, **about})}


def about_of(reader: Reader) -> dict[str, Any]:
    """What ``as_text`` was given.

    Raises:
        ValueError: The file was not written by this version.
    """
    about = json.loads(reader.metadata.get(_KEY, "null"))
    if not isinstance(about, dict) or about.get("version") != _VERSION:
        raise ValueError(f"the shard file was not written by version {_VERSION} of this format")
    return about


def saved_shards(reader: Reader, boxes: Mapping[str, Any]) -> Iterator[SavedShard]:
    """The boxes that a file holds, as ``boxes_of`` told of them."""
    for name, box in boxes.items():
        yield SavedShard(
            fqn=name,
            global_shape=tuple(box["global_shape"]),
            offsets=tuple(box["offsets"]),
            shape=tuple(box["shape"]),
            read=lambda slices, name=name: reader.part(name, slices),  # type: ignore[misc]  # mypy cannot type a default in a lambda
        )
