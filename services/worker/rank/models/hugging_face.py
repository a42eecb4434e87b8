"""Models of the library ``transformers``, from a configuration or from saved weights.

They are built on the meta device, sharded, and then filled: with first values as the library draws
them, or from safetensors files, of which each rank reads its own slices. No rank ever holds the whole
model: at most one block of it, where first values are drawn. Nothing is downloaded, and no code that
lies beside a configuration is run.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from services.worker.rank.data.roots import inside

_INDEX: Final = "model.safetensors.index.json"
_ONE_FILE: Final = "model.safetensors"
_BESIDE: Final = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
)
_NAMED: Final = 5
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class PretrainedFilesError(ValueError):
    """A folder of a model does not hold what its configuration asks for."""


def hf_causal_lm(
    config: str | None = None,
    model: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    attn_implementation: str = "sdpa",
    *,
    data_roots: Sequence[Path] | None = None,
) -> nn.Module:
    """A language model: batches are int64 tokens, or mappings with ``input_ids`` and ``labels``.

    Args:
        config: A folder with ``config.json``, or that file: first values are drawn by the job's seed.
        model: A folder with safetensors files beside its configuration: values come from there.
        overrides: Fields of the configuration to change.
        attn_implementation: As the library names it.
        data_roots: Folders below which the folder must lie; None: anywhere.

    Returns:
        The library's own model, with parameters in fp32.

    Raises:
        ValueError: Both or neither of ``config`` and ``model`` are given.
        PretrainedFilesError: The folder does not hold what it should.
        PathOutsideRootsError: It lies elsewhere.
    """
    return _made("AutoModelForCausalLM", config, model, overrides, attn_implementation, data_roots)


def hf_sequence_classification(
    config: str | None = None,
    model: str | None = None,
    num_labels: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    attn_implementation: str = "sdpa",
    *,
    data_roots: Sequence[Path] | None = None,
) -> nn.Module:
    """A classifier of texts: batches are mappings with ``input_ids`` and ``labels``.

    The head may be missing in saved weights of a language model; it then gets first values.
    ``num_labels`` is the number of classes, by default the configuration's. All else as of
    ``hf_causal_lm``.
    """
    changed = {**(overrides or {}), **({} if num_labels is None else {"num_labels": num_labels})}
    return _made(
        "AutoModelForSequenceClassification",
        config,
        model,
        changed,
        attn_implementation,
        data_roots,
    )


hf_causal_lm.meta_init = True  # type: ignore[attr-defined]  # a mark for the trainer
hf_sequence_classification.meta_init = True  # type: ignore[attr-defined]  # as above


def _made(
    kind: str,
    config: str | None,
    model: str | None,
    overrides: Mapping[str, Any] | None,
    attn_implementation: str,
    data_roots: Sequence[Path] | None,
) -> nn.Module:
    import transformers  # noqa: PLC0415 (takes seconds, and few jobs need it)

    if (config is None) == (model is None):
        raise ValueError(
            "model.args: give config (first values) or model (saved weights), not both"
        )
    given = str(config or model)
    place = inside(given, data_roots) if data_roots is not None else Path(given)
    folder = place.parent if place.is_file() else place
    if not (folder / "config.json").is_file():
        field = "config" if model is None else "model"
        raise PretrainedFilesError(f"model.args.{field}: there is no {folder}/config.json")
    if "/" in str(attn_implementation):  # the library takes one of each part of a model, too
        raise ValueError(
            f"model.args.attn_implementation: {attn_implementation} is code of the Hub, and nothing is "
            "downloaded; name one that the library has, such as sdpa"
        )
    own = {"local_files_only": True, "trust_remote_code": False}
    kind_of_settings = type(transformers.AutoConfig.from_pretrained(folder, **own))
    fields, _ = transformers.PretrainedConfig.get_config_dict(folder, **own)
    # Only here: where a configuration is read, the library takes some of their names for other folders and files.
    settings = kind_of_settings.from_dict(
        fields, **{"name_or_path": str(folder), **(overrides or {})}
    )
    settings.use_cache = False  # of keys and values: for generation, and large
    made: nn.Module = getattr(transformers, kind).from_config(
        settings,
        dtype=torch.float32,
        attn_implementation=attn_implementation,
        trust_remote_code=False,
    )
    values = PretrainedValues(made, folder, None if model is None else _files(folder))
    made.first_values = values  # type: ignore[assignment]  # looked for by the trainer
    return made


class PretrainedValues:
    """Where the values of a model come from.

    Args:
        model: Of the library, on the meta device.
        folder: Of its configuration.
        files: By name of a tensor, the file that has it; None: first values are drawn.
    """

    def __init__(self, model: nn.Module, folder: Path, files: Mapping[str, Path] | None) -> None:
        self._files = files
        self._prefix = str(getattr(model, "base_model_prefix", ""))
        self._aliases = _aliases(model)
        self._initialisers = dict(_initialisers(model))
        self._blocks = frozenset(getattr(model, "_no_split_modules", None) or ())
        self._folder = folder
        self._config = str(_config(model).to_json_string(use_diff=True))
        if files is not None:
            self._check(model, files)

    def groups(self, model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        """Modules to fill at once: names, and whether with all below them.

        A block is one: what draws its values may look into modules below.
        """
        within: str | None = None
        for name, module in model.named_modules():
            if within is not None and name.startswith(within):
                continue
            is_block = type(module).__name__ in self._blocks
            within = f"{name}." if is_block else None
            yield name, module, is_block

    def fill(self, name: str, module: nn.Module, *, below: bool) -> None:
        """Has the library draw the first values of a module, and of those below it."""
        # What a module says of those in it is the last word: those come first.
        inner = list(module.named_modules(prefix=name))[:0:-1] if below else []
        for full, each in (*inner, (name, module)):
            self._initialisers[full](each)

    def read(self, fqn: str, slices: tuple[slice, ...]) -> torch.Tensor | None:
        """That part of a tensor of the files; None where first values are drawn."""
        found = self._place(fqn)
        if found is None:
            return None
        key, path = found
        return _saved(path)[key].part(slices)

    @functools.cached_property
    def files(self) -> Mapping[str, bytes]:
        """What belongs beside the weights for the library to read them: by file name."""
        beside = {
            name: (self._folder / name).read_bytes()
            for name in _BESIDE
            if (self._folder / name).is_file()
        }
        return {"config.json": self._config.encode(), **beside}

    def _place(self, fqn: str) -> tuple[str, Path] | None:
        if self._files is None:
            return None
        for name in self._aliases.get(fqn, (fqn,)):
            for key in (name, name.removeprefix(f"{self._prefix}."), f"{self._prefix}.{name}"):
                if key in self._files:
                    return key, self._files[key]
        return None

    def _check(self, model: nn.Module, files: Mapping[str, Path]) -> None:
        missing, different = [], []
        for name, parameter in model.named_parameters():
            found = self._place(name)
            if found is None:
                # A head that language models lack is drawn at random; the body must be there.
                if name.startswith(f"{self._prefix}.") or not _is_classifier(model):
                    missing.append(name)
                continue
            shape = _saved(found[1])[found[0]].shape
            if shape != tuple(parameter.shape):
                different.append(
                    f"{name} has {shape}, the configuration says {tuple(parameter.shape)}"
                )
        if missing:
            raise PretrainedFilesError(
                f"model.args.model: {self._folder} lacks {_some(missing)}; it has "
                f"{_some(sorted(files))}. Save it again with this version of transformers"
            )
        if different:
            raise PretrainedFilesError(f"model.args.model: in {self._folder} {_some(different)}")


def _is_classifier(model: nn.Module) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def own_configuration(model: nn.Module) -> Mapping[str, bytes]:
    """The file ``config.json`` of a model of the library that a factory of the user's made, else nothing.

    With it ``from_pretrained`` loads an export. The library is not imported to know its classes.
    """
    if all(each.__module__ != "transformers.modeling_utils" for each in type(model).__mro__):
        return {}
    return {"config.json": str(_config(model).to_json_string(use_diff=True)).encode()}


def _config(model: nn.Module) -> Any:  # noqa: ANN401 (the library's classes are dynamic)
    return model.config


def _aliases(model: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """The names of each parameter that has several, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(same) for same in names.values() if len(same) > 1 for name in same}


def _initialisers(model: nn.Module) -> Iterator[tuple[str, Callable[[nn.Module], None]]]:
    """What draws the values of each module: the model of the library that it lies in says it."""
    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0] if name else ""
        owners[name] = module if hasattr(module, "_init_weights") else owners[parent]
        yield name, owners[name]._init_weights  # noqa: SLF001 (what the library has models override)


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a safetensors file, of which parts can be read.

    The library maps files privately and writable, which counts as memory that the process may
    write (``resources.memory_gib``): here they are mapped for reading.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def part(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """A copy of a part, one slice a dim."""
        word = np.dtype(f"u{self.dtype.itemsize}")
        mapped = np.memmap(self.path, word, "r", self.start, self.shape or (1,))
        copied = torch.from_numpy(np.array(mapped[slices])).view(self.dtype)
        return copied if self.shape else copied.reshape(())


@functools.cache
def _saved(path: Path) -> Mapping[str, SavedTensor]:
    """The tensors of a safetensors file by name (https://huggingface.co/docs/safetensors)."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    unknown = {each["dtype"] for each in header.values()} - set(_DTYPES)
    if unknown:
        raise PretrainedFilesError(f"model.args.model: {path} has dtypes {_some(sorted(unknown))}")
    return {
        name: SavedTensor(
            path, _DTYPES[each["dtype"]], tuple(each["shape"]), 8 + length + each["data_offsets"][0]
        )
        for name, each in header.items()
    }


def _files(folder: Path) -> Mapping[str, Path]:
    if (index := folder / _INDEX).is_file():
        placed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / Path(name).name for key, name in placed.items()}
    if (one := folder / _ONE_FILE).is_file():
        return dict.fromkeys(_saved(one), one)
    raise PretrainedFilesError(
        f"model.args.model: {folder} has neither {_ONE_FILE} nor {_INDEX}; weights that are pickled "
        "are not read. Save them with save_pretrained, or give config for first values"
    )
