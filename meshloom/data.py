"""What a data factory may return, in addition to data sets and loaders of PyTorch and Hugging Face.

A factory may return one of the classes below, or, without any of them: a map-style data set (it has
``__len__`` and ``__getitem__``, as ``torch.utils.data.Dataset`` and ``datasets.Dataset`` have), a
``torch.utils.data.DataLoader`` over one, an ``IterableDataset`` or a loader over one, a ``torchdata``
``StatefulDataLoader``; a pair ``(train, validation)`` of these, or a mapping with ``train`` and
``validation``. Of a ``DataLoader`` over a map-style set the data set, ``collate_fn``, ``num_workers``,
``prefetch_factor`` and ``worker_init_fn`` are used. Its batch size and its sampler are not:
``train.global_batch`` and the order that ``MapSource`` describes take their place.

A batch is a tensor, or a tuple, list, mapping, named tuple or dataclass of batches. Every tensor in it
has the samples along its first dim; what is no tensor is left as it is.
"""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Batch = Any
Unit = Literal["tokens", "samples"]


class DataSource(abc.ABC):
    """Samples, addressed by step and place.

    A source has no state: the samples of a step are a function of the step. So a resumed run gets
    exactly the samples of the uninterrupted one, and a job of any number of ranks the same global
    batch.

    A data factory is a callable that takes the arguments of ``data.args`` and, if it has a parameter
    of that name which ``data.args`` leaves out, ``seed`` (the job's). It may return a source, or
    anything else that docs/your-own-training.md lists.
    """

    @property
    @abc.abstractmethod
    def digest(self) -> str:
        """Identifies the data: equal if and only if all samples are. Written into checkpoints."""

    @abc.abstractmethod
    def batch(self, step: int, indices: Sequence[int]) -> Batch:
        """The samples at ``indices`` (from 0) of the global batch of ``step`` (from 1), on the CPU."""

    def validation(self) -> Sequence[Batch]:
        """Batches for validation, the same at each call; none by default."""
        return ()

    def baselines(self) -> Mapping[str, float]:
        """Losses of simple models on the validation data, by name; none by default."""
        return {}


@dataclass(frozen=True, kw_only=True)
class _Options:
    """How samples of a data set become batches.

    Attributes:
        collate_fn: From a list of samples to a batch; None: as PyTorch's ``default_collate``.
        validation: A map-style data set, or a ``DataLoader`` over one, that is only validated on.
        validation_batch: How many samples of it a rank evaluates at a time.
        workers: Processes of each rank that read ahead of the training; 0: the rank reads itself,
            between its steps.
        prefetch: How many steps each of them reads ahead.
        worker_init_fn: Called in each of them with its number.
        digest: How the data is named in checkpoints. ``content``: by the samples, as the class
            says. ``files``: by path, size and time of change of ``files``, which is quick and holds
            where all nodes read one file system. Any other text is the name itself, to be changed
            whenever the data is.
        files: Files and folders that the data is read from, for ``digest="files"``.
    """

    collate_fn: Callable[[list[Any]], Batch] | None = None
    validation: Any = None
    validation_batch: int = 16
    workers: int = 0
    prefetch: int = 2
    worker_init_fn: Callable[[int], None] | None = None
    digest: str = "content"
    files: Sequence[str | Path] = ()

    def __post_init__(self) -> None:
        if self.workers < 0 or self.prefetch < 1 or self.validation_batch < 1:
            raise ValueError(
                "workers must be at least 0, prefetch and validation_batch at least 1; these are "
                f"{self.workers}, {self.prefetch} and {self.validation_batch}"
            )
        if self.digest == "files" and not self.files:
            raise ValueError('digest="files" needs files: the files or folders that are read')


@dataclass(frozen=True)
class MapSource(_Options):
    """A map-style data set, with options.

    Samples are numbered through the whole job. Sample ``n`` is at place ``n % len`` of epoch
    ``n // len``, and the order of an epoch is a permutation that follows from the job's seed and the
    epoch; so epochs follow each other without a gap, and a batch may have samples of two. Step ``s``
    takes the next ``train.global_batch`` of them, whatever the number of ranks. A checkpoint holds
    how many were taken: a run that goes on from it, with as many ranks or others, with this global
    batch or (a clone) another, loses and repeats none.

    While a sample is read, the random generators of Python, NumPy and PyTorch's CPU are seeded by
    (seed, number of the sample): random augmentation is the same in a resumed run, with any number of
    ranks and workers.

    ``digest="content"`` covers every sample of a ``TensorDataset`` and a ``datasets.Dataset``; of
    other data sets their length and at most 1024 samples, spread evenly. A data set with an
    attribute ``digest`` (a text) is identified by it.

    Attributes:
        dataset: Has ``__len__`` and ``__getitem__``; the latter is called with 0 .. len - 1.
        validation_fraction: The part that is used only for validation. A hash of the index,
            independent of the seed, decides whether an index belongs to it.
        shuffle: False: every epoch has the samples in their own order.
    """

    dataset: Any
    validation_fraction: float = 0.0
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be in [0, 1); it is {self.validation_fraction}"
            )
        if self.validation_fraction and self.validation is not None:
            raise ValueError("give validation or validation_fraction, not both")


@dataclass(frozen=True)
class IterableSource(_Options):
    """A data set, or a loader, that can only be iterated, with options.

    Every rank iterates the whole stream and keeps its own samples. A checkpoint holds how many
    samples were taken. A run that goes on from it asks ``load_state_dict`` of the loader or data
    set, where it has ``state_dict`` too; else it reads again from the start of the epoch to that
    position, which takes as long as reading does. When the stream ends, it is started over
    (``set_epoch`` is called first, where there is one), without a gap.

    The guarantee is weaker than that of a ``MapSource``: no sample is lost or repeated if the data
    set gives the same samples in the same order whenever it starts with the same random state. It
    starts with the generators of Python, NumPy and PyTorch's CPU seeded by (seed, epoch), the same
    on all ranks. With ``workers``, a data set shares itself out among them by ``get_worker_info``,
    as PyTorch demands, and its order depends on their number.

    ``digest="content"`` covers the first samples only.

    Attributes:
        dataset: Gives samples when iterated; a loader gives batches.
    """

    dataset: Iterable[Any]


@dataclass(frozen=True)
class Mixture:
    """Several map-style sources; each sample is drawn from one of them.

    Which one is a function of (seed, number of the sample) with the given odds. Each source has its
    own epochs; small ones are repeated more often. Validation is on all validation data of all
    sources.

    Attributes:
        parts: Pairs of a ``MapSource`` (or what one is made of) and a weight above 0. Their samples
            must collate together, by the ``collate_fn`` of the first; its ``workers`` count too.
    """

    parts: Sequence[tuple[Any, float]]

    def __post_init__(self) -> None:
        if not self.parts or any(not weight > 0 for _, weight in self.parts):
            raise ValueError("a mixture needs parts, each with a weight above 0")
