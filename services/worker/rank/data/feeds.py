"""Makes a ``Feed`` of whatever a data factory made; ``meshloom.data`` lists what that may be."""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_convert,
)

from meshloom.data import DataSource, IterableSource, MapSource, Mixture
from services.worker.rank.data import digests
from services.worker.rank.data.loading import Workers
from services.worker.rank.data.map_feed import MapData, MapFeed, ValidationBatches
from services.worker.rank.data.order import SampleOrder, held_out
from services.worker.rank.data.samples import Chosen, SampleReader, own_random_state
from services.worker.rank.data.share import Share
from services.worker.rank.data.source import (
    AddressedFeed,
    DataError,
    Feed,
    tokenizer_size_of,
)
from services.worker.rank.data.stream_feed import StreamFeed

_TRAIN: Final = "train"
_VALIDATION: Final = "validation"
_PAIR: Final = 2
_PREFETCH: Final = 2
_NOT_USED: Final = (
    "data.factory: the DataLoader's {chooser} is not used: each epoch has every sample of its data set "
    "once, in an order that follows from seed and epoch. Use a torch.utils.data.Subset for a part "
    "of them, a meshloom.Mixture for weights, an IterableDataset for any other order"
)


def feed_of(made: object, share: Share, seed: int) -> Feed:
    """The shares of whatever a data factory made.

    Args:
        made: See ``meshloom.data``.
        share: This rank's part of each step.
        seed: The job's.

    Raises:
        DataError: It gives no batches, or no sample.
    """
    if hasattr(made, "digest") and callable(getattr(made, "batch", None)):
        return AddressedFeed(cast("DataSource", made), share)
    source = _source(made)
    if isinstance(source, Mixture):
        parts = [(_map_source(part), weight) for part, weight in source.parts]
        notices = [notice for part, _ in source.parts for notice in _unused(part)]
        return MapFeed(_map_data(parts, seed, notices), share)
    if isinstance(source, MapSource):
        return MapFeed(_map_data([(source, 1.0)], seed, _unused(made)), share)
    if isinstance(source, IterableSource):
        given = () if source.validation is None else (source.validation,)
        return StreamFeed(source, share, seed, _validation(given, source))
    raise DataError(
        f"data.factory made a {type(made).__name__}, which gives no batches: return a data set (with "
        "__len__ and __getitem__), a DataLoader, a pair or a mapping of train and validation, or a "
        "meshloom.DataSource"
    )


# -- What was made, as one of our sources


def _source(made: object) -> object:
    """``made`` as one of our sources; itself if it is none of what can be one."""
    if isinstance(made, Mapping):
        if _TRAIN not in made:
            raise DataError(
                f"data.factory made a mapping of {', '.join(map(str, made)) or 'nothing'}; it needs "
                f"{_TRAIN!r} and may have {_VALIDATION!r}"
            )
        return _validated(made[_TRAIN], made.get(_VALIDATION))
    if isinstance(made, tuple) and len(made) == _PAIR and all(map(_gives_samples, made)):
        return _validated(*made)
    if isinstance(made, tuple):
        kinds = ", ".join(type(each).__name__ for each in made)
        raise DataError(
            f"data.factory made a tuple of {kinds or 'nothing'}, which is not a pair of data sets "
            "(train, validation); to train on columns of samples, use "
            "torch.utils.data.TensorDataset(x, y)"
        )
    return _single(made)


def _validated(train: object, validation: object) -> object:
    source = _single(train)
    if validation is None:
        return source
    if not isinstance(source, MapSource | IterableSource) or source.validation is not None:
        raise DataError(
            f"data.factory made a {type(train).__name__} to train on and, beside it, data to validate "
            "on; give the latter as its validation"
        )
    return dataclasses.replace(source, validation=validation)


def _single(made: object) -> object:
    if isinstance(made, DataLoader):
        return _of_loader(made)
    if _is_map_style(made):
        return MapSource(dataset=made)
    return IterableSource(dataset=cast("Any", made)) if _is_stream(made) else made


def _of_loader(loader: DataLoader[Any]) -> object:
    has_own_order = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    if has_own_order or not _is_map_style(loader.dataset):
        return IterableSource(dataset=loader)
    # Without batches of its own a loader has no function that joins samples.
    joins = loader.collate_fn if loader.collate_fn is not default_convert else None
    return MapSource(
        dataset=loader.dataset,
        collate_fn=joins,
        workers=loader.num_workers,
        prefetch=loader.prefetch_factor or _PREFETCH,
        worker_init_fn=loader.worker_init_fn,
    )


def _unused(made: object) -> Sequence[str]:
    """What of the loaders in ``made`` has no effect, and what has one in its place."""
    if isinstance(made, DataLoader):
        chooser = _own_chooser(made)
        return () if chooser is None else (_NOT_USED.format(chooser=chooser),)
    if isinstance(made, Mapping):
        return [notice for each in made.values() for notice in _unused(each)]
    if isinstance(made, tuple):
        return [notice for each in made for notice in _unused(each)]
    if isinstance(made, MapSource):
        return _unused(made.validation)
    return ()


def _own_chooser(loader: DataLoader[Any]) -> str | None:
    """The class of a loader's sampler, if it chooses other samples than each once an epoch."""
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return type(batches).__name__
    sampler: Any = loader.sampler if batches is None else batches.sampler
    if type(sampler) is RandomSampler:
        is_plain = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        return None if is_plain else f"RandomSampler of {sampler.num_samples} samples"
    # Sharing samples out over ranks is what the order does, too.
    is_plain = type(sampler) in (SequentialSampler, DistributedSampler)
    return None if is_plain else type(sampler).__name__


def _map_source(made: object) -> MapSource:
    source = _source(made)
    if not isinstance(source, MapSource):
        raise DataError(
            f"data.factory: a mixture takes map-style sources; this part is a {type(made).__name__}"
        )
    return source


def _is_map_style(made: object) -> bool:
    has_samples = hasattr(made, "__len__") and hasattr(made, "__getitem__")
    return has_samples and not isinstance(made, str | bytes | Mapping | IterableDataset)


def _is_stream(made: object) -> bool:
    # A set has another order on each rank.
    return isinstance(made, IterableDataset) or (
        hasattr(made, "__iter__")
        and not isinstance(made, str | bytes | Mapping | Set | torch.Tensor)
    )


def _gives_samples(made: object) -> bool:
    return isinstance(made, MapSource | IterableSource | Mixture | DataLoader) or (
        (_is_map_style(made) or _is_stream(made)) and not hasattr(made, "shape")
    )


# -- The feed of map-style sources


def _map_data(
    parts: Sequence[tuple[MapSource, float]], seed: int, notices: Sequence[str]
) -> MapData:
    first = parts[0][0]
    names, datasets, validation = [], [], []
    sizes = [tokenizer_size_of(each) for part, _ in parts for each in _all_of(part)]
    for source, weight in parts:
        whole = _torch_format(source.dataset)
        names.append([_digest(source, whole), source.validation_fraction, source.shuffle, weight])
        kept, held = whole, source.validation
        if source.validation_fraction:
            indices = held_out(len(whole), source.validation_fraction)
            kept, held = Chosen(whole, indices[0]), Chosen(whole, indices[1])
        datasets.append(_filled(kept, "to train on"))
        if held is not None:
            validation.append(held)
    collate = first.collate_fn
    order = SampleOrder(
        [len(dataset) for dataset in datasets],
        [weight for _, weight in parts],
        seed,
        [source.shuffle for source, _ in parts],
    )
    return MapData(
        SampleReader(datasets, collate, seed),
        order,
        digests.of_values("map-style", names),
        _validation(validation, first),
        Workers(first.workers, first.prefetch, first.worker_init_fn) if first.workers else None,
        tuple(dict.fromkeys(notices)),
        max((size for size in sizes if size is not None), default=None),
    )


def _all_of(source: MapSource) -> Sequence[object]:
    return [source.dataset, source.validation]


def _validation(given: Sequence[Any], source: MapSource | IterableSource) -> Sequence[Any]:
    datasets, collate, batch = [], source.collate_fn, source.validation_batch
    for each in given:
        dataset = each
        if isinstance(each, DataLoader):
            collate = each.collate_fn
            dataset, batch = each.dataset, each.batch_size or batch
        if not _is_map_style(dataset):
            raise DataError(
                f"data.factory: the data to validate on is a {type(dataset).__name__}; it must be "
                "map-style (with __len__ and __getitem__), for every pass takes the same of it"
            )
        datasets.append(_filled(_torch_format(dataset), "to validate on"))
    # Jobs of different seeds are compared on the same.
    return ValidationBatches(SampleReader(datasets, collate, 0, _VALIDATION), batch)


def _digest(source: MapSource, dataset: Any) -> str:  # noqa: ANN401 (as a user wrote it)
    if source.digest == "files":
        return digests.of_files(source.files)
    if source.digest != "content":
        return source.digest
    # What is random in a sample is drawn alike on all ranks, and whatever the job's seed.
    reader = SampleReader([dataset], None, 0, "digest")
    with own_random_state():
        return digests.of_content(dataset, reader.read)


def _filled(dataset: Any, purpose: str) -> Any:  # noqa: ANN401 (as a user wrote it)
    if len(dataset) == 0:
        raise DataError(
            f"data.factory: the data set {purpose} is empty; it needs at least one sample"
        )
    return dataset


def _torch_format(dataset: Any) -> Any:  # noqa: ANN401 (as a user wrote it)
    """Tables of Hugging Face's library give tensors, unless their format was chosen."""
    if digests.is_table(dataset) and dataset.format["type"] is None:
        return dataset.with_format("torch")
    return dataset
