"""All that a run is after a step, as tensors and text: what a checkpoint holds of one rank.

Tensors of the model and the optimizer are boxes of whole tensors, which the boxes of all ranks
tile, so a run of another number of ranks can be filled from them. Random states belong to a rank.
Where the run is in its data is the same on all ranks, whatever their number. Nothing else is state:
schedule and seeds follow from the step and the spec.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_core.checkpoint import (
    SavedShard,
    load_model_state,
    load_optimizer_state,
    local_shards,
    model_state,
    optimizer_state,
)
from services.worker.rank.checkpoints.shard_file import ShardReader
from services.worker.rank.data.source import BEGINNING, Feed
from services.worker.rank.gang.groups import Gang
from services.worker.rank.seeds import derive

_KEY: Final = "meshloom"
_VERSION: Final = 1
FILE: Final = "file."
"""Begins the names of tensors that hold a file's bytes; an export writes these files."""
_TORCH_RANDOM: Final = "random.torch"
_CUDA_RANDOM: Final = "random.cuda"


@dataclass(frozen=True)
class TrainedParts:
    """What changes as a run trains, and where.

    Attributes:
        model: Sharded.
        optimizer: Over its parameters.
        gang: The ranks.
        data_digest: Names the data.
        seed: The job's.
        files: What belongs beside the exported weights, by plain file name; rank 0 saves it.
        data: Where it is in the data; None: the step says it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    gang: Gang
    data_digest: str
    seed: int
    files: Mapping[str, bytes] = field(default_factory=dict)
    data: Feed | None = None


@dataclass(frozen=True)
class TrainingState:
    """What one rank saves.

    Attributes:
        step: Steps that were made.
        loss: Of the last of them; None before the first.
        tensors: By name, where they are: the next step changes them.
        text: The boxes and the random states that are no tensors, as safetensors metadata.
        lasting: Names of the tensors that nothing but the optimizer's step changes.
    """

    step: int
    loss: float | None
    tensors: Mapping[str, torch.Tensor]
    text: Mapping[str, str]
    lasting: frozenset[str] = frozenset()


def capture(parts: TrainedParts, step: int, loss: float | None) -> TrainingState:
    """The state of ``parts`` after ``step`` steps on this rank."""
    model = model_state(parts.model)
    optimizer = optimizer_state(parts.model, parts.optimizer)
    state = {**model, **optimizer}
    # Modules compute with whole copies of sharded parameters. Anything else, buffers above all,
    # they may change in a forward pass.
    sharded = {name for name, tensor in model.items() if isinstance(tensor, DTensor)}
    entries = local_shards(state, parts.gang.mesh)
    tensors = {entry.fqn: entry.tensor for entry in entries}
    tensors[_TORCH_RANDOM] = torch.get_rng_state()
    if parts.gang.device.type == "cuda":
        tensors[_CUDA_RANDOM] = torch.cuda.get_rng_state(parts.gang.device)
    if parts.gang.rank == 0:
        tensors |= {
            FILE + name: torch.frombuffer(bytearray(content), dtype=torch.uint8)
            for name, content in parts.files.items()
            if content
        }
    about = {
        "version": _VERSION,
        "step": step,
        "rank": parts.gang.rank,
        "world_size": parts.gang.world_size,
        "mesh": _axes(parts),
        "data_digest": parts.data_digest,
        "data": {} if parts.data is None else dict(parts.data.state()),
        "boxes": {
            entry.fqn: {
                "global_shape": entry.global_shape,
                "offsets": entry.offsets,
                "shape": tuple(entry.tensor.shape),
            }
            for entry in entries
        },
        "python_random": random.getstate(),
        "numpy_random": _numpy_state(),
    }
    lasting = frozenset(
        name for name in tensors if name in sharded or name in optimizer or name.startswith(FILE)
    )
    return TrainingState(step, loss, tensors, {_KEY: json.dumps(about)}, lasting)


def restore(parts: TrainedParts, readers: Iterable[ShardReader]) -> None:
    """Fills the parts from the files of all ranks that saved.

    Args:
        parts: Freshly built.
        readers: One a saved rank. Values are read from those files only that hold something of
            this rank's.

    Raises:
        CheckpointError: The files do not hold what this model and optimizer need.
        ValueError: A file's text is not what ``capture`` wrote.
    """
    abouts = [(reader, _about(reader)) for reader in readers]
    shards = [shard for reader, about in abouts for shard in _shards(reader, about["boxes"])]
    load_model_state(parts.model, shards)
    load_optimizer_state(parts.model, parts.optimizer, shards)
    step = abouts[0][1]["step"]
    _restore_position(parts, abouts[0][1])
    for reader, about in abouts:
        if (about["rank"], about["mesh"]) == (parts.gang.rank, _axes(parts)):
            _restore_random(parts, reader, about)
            return
    # On another mesh no saved rank is this one. A seed of its own is as good as any, and the same
    # whenever the same checkpoint is resumed on this mesh.
    torch.manual_seed(derive(parts.seed, "rank", parts.gang.data_rank, "resumed at", step))


def _restore_position(parts: TrainedParts, about: Mapping[str, Any]) -> None:
    if parts.data is not None:
        is_same = about.get("data_digest") == parts.data_digest
        # A clone with other data begins it; a checkpoint of an older version had no other position
        # than the step's.
        position = about.get("data", {}) if is_same else BEGINNING
        parts.data.restore(position, about["step"])


def _axes(parts: TrainedParts) -> dict[str, int]:
    mesh = parts.gang.mesh
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _about(reader: ShardReader) -> dict[str, Any]:
    about = json.loads(reader.metadata.get(_KEY, "null"))
    if not isinstance(about, dict) or about.get("version") != _VERSION:
        raise ValueError(f"the shard file was not written by version {_VERSION} of this format")
    return about


def _shards(reader: ShardReader, boxes: Mapping[str, Any]) -> Iterator[SavedShard]:
    for name, box in boxes.items():
        yield SavedShard(
            fqn=name,
            global_shape=tuple(box["global_shape"]),
            offsets=tuple(box["offsets"]),
            shape=tuple(box["shape"]),
            read=lambda slices, name=name: reader.part(name, slices),  # type: ignore[misc]  # mypy cannot type a default in a lambda
        )


def _restore_random(parts: TrainedParts, reader: ShardReader, about: Mapping[str, Any]) -> None:
    torch.set_rng_state(reader.tensor(_TORCH_RANDOM))
    if parts.gang.device.type == "cuda":
        torch.cuda.set_rng_state(reader.tensor(_CUDA_RANDOM), parts.gang.device)
    version, words, gauss = about["python_random"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(about["numpy_random"])


def _numpy_state() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    words = state["state"]
    return {**state, "state": {"key": words["key"].tolist(), "pos": words["pos"]}}
