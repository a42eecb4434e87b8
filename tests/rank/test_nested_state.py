"""A script's state as tensors and JSON, and back."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import nn

from fsdp_core.checkpoint import SavedShard
from fsdp_core.errors import CheckpointError
from services.worker.rank.checkpoints import beside, shard_file
from services.worker.rank.checkpoints.random_state import random_tensors
from services.worker.rank.checkpoints.state import about_of, as_text
from services.worker.rank.script import nested


def shards(tensors: dict[str, torch.Tensor]) -> list[SavedShard]:
    """As one rank saves whole tensors."""
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    return [
        SavedShard(
            fqn=name,
            global_shape=tuple(tensor.shape),
            offsets=(0,) * tensor.dim(),
            shape=tuple(tensor.shape),
            read=lambda slices, tensor=tensor: tensor[slices],  # type: ignore[misc]  # mypy cannot type a default in a lambda
        )
        for name, tensor in kept.items()
    ]


def through_a_file(state: object, into: object) -> Any:  # noqa: ANN401 (any nesting)
    taken = nested.taken(state)
    return nested.restored(into, json.loads(json.dumps(taken.tree)), shards(taken.tensors))


def test_plain_values_come_back_with_their_types_and_their_keys() -> None:
    state = {
        "step": 7,
        3: [True, None, -0.0, float("inf"), "ü"],
        "pair": (1, {"deep": 2}),
        "numpy": np.float32(0.5),
        "empty": {},
        "tensor": torch.arange(3),
    }
    found = through_a_file(state, dict.fromkeys(state))
    assert torch.equal(found.pop("tensor"), torch.arange(3))
    assert found == {
        "step": 7,
        3: [True, None, -0.0, float("inf"), "ü"],
        "pair": (1, {"deep": 2}),
        "numpy": 0.5,
        "empty": {},
    }
    assert isinstance(found["pair"], tuple)


def test_tensors_and_objects_are_filled_in_place_and_a_new_optimizer_gets_its_state() -> None:
    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def trained(parts: tuple[nn.Module, torch.optim.Optimizer, Any]) -> list[float]:
        model, optimizer, schedule = parts
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            loss = model(torch.randn(4, 3)).square().sum()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    first, second = made(1), made(2)
    trained(first)
    weight = second[0].get_parameter("0.weight")
    found = through_a_file(list(first), list(second))
    assert [new is old for new, old in zip(found, second, strict=True)] == [True] * 3
    assert second[0].get_parameter("0.weight") is weight
    assert trained(second) == trained(first)


class Wrapped(nn.Linear):
    """Gives copies for its state, as wrappers do that gather shards for it, and counts how often it ran."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.passes = 0

    def state_dict(self, *_: Any, **__: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]  # noqa: ANN401 as torch's
        return {name: each.clone() for name, each in super().state_dict().items()}

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.passes = int(state)


class Versioned(nn.Linear):
    """Gives copies by a hook, and turns what an older version gave."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(  # type: ignore[no-untyped-call]  # PyTorch's
            lambda _, state, *__: state.update({n: each.clone() for n, each in state.items()})
        )

    def _load_from_state_dict(
        self,
        state_dict: dict[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, int],
        *others: Any,  # noqa: ANN401 torch's
    ) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


class Told(nn.Linear):
    """Keeps what follows from its weight, and knows that it was loaded."""

    def __init__(self, features: int = 2) -> None:
        super().__init__(features, 2)
        self.heard: list[str] = []
        self.total = self.weight.detach().sum()
        self.register_load_state_dict_pre_hook(lambda *_: self.heard.append("before"))  # type: ignore[no-untyped-call]  # PyTorch's
        self.register_load_state_dict_post_hook(self.count)  # type: ignore[no-untyped-call]  # PyTorch's

    def count(self, *_: object) -> None:
        self.heard.append("after")
        self.total = self.weight.detach().sum()


class Replacing(Told):
    """Has other parameters once it is loaded."""

    def _load_from_state_dict(self, *args: Any) -> None:  # noqa: ANN401 torch's
        self.weight = nn.Parameter(torch.zeros_like(self.weight))
        super()._load_from_state_dict(*args)


class Rebuilding(nn.Module):
    """Makes its layers again before it takes their state, and takes no ``strict``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Told(), nn.BatchNorm1d(2))

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:  # type: ignore[override]  # what is tried
        self.inner = nn.Sequential(Told(), nn.BatchNorm1d(2))
        super().load_state_dict(state_dict)


class Fresh(Told):
    """Is reset before it takes its state."""

    def load_state_dict(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 torch's
        self.reset_parameters()
        return super().load_state_dict(*args, **options)


class Hooked(Told):
    """Has a hook that resets it before it takes its state, and a layer that is not made yet."""

    def __init__(self) -> None:
        super().__init__()
        self.later = nn.LazyLinear(2)
        self.register_load_state_dict_pre_hook(lambda *_: self.reset_parameters())  # type: ignore[no-untyped-call]  # PyTorch's


class Growing(nn.Module):
    """Has rows that come in training, in a buffer and in its extra state."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(0, 2))
        self.seen: dict[str, int] = {"passes": 0}

    def get_extra_state(self) -> dict[str, int]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state

    def _load_from_state_dict(
        self,
        state: dict[str, torch.Tensor],
        prefix: str,
        *args: Any,  # noqa: ANN401 torch's
    ) -> None:
        self.rows = torch.empty_like(state[f"{prefix}rows"])
        super()._load_from_state_dict(state, prefix, *args)


class Brief(nn.Linear):
    """Saves a part of what it has, as adapters do of a large model."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_state_dict_post_hook(drop_weight)  # type: ignore[no-untyped-call]  # PyTorch's


def drop_weight(_: nn.Module, state: dict[str, torch.Tensor], *__: object) -> None:
    del state["weight"]


class History:
    """Grows."""

    def __init__(self, *values: float) -> None:
        self.values = torch.tensor(values)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.values = state["values"]


def test_a_module_that_gives_copies_takes_back_what_was_saved() -> None:
    first, second = Wrapped(), Wrapped()
    first.passes = 3
    assert through_a_file({"m": first}, {"m": second})["m"] is second
    assert torch.equal(second.weight, first.weight)
    assert second.passes == 3


def test_a_module_that_takes_back_copies_hears_of_which_version_they_are() -> None:
    first, second = Versioned(), Versioned()
    through_a_file({"m": first}, {"m": second})
    assert torch.equal(second.weight, first.weight)


@pytest.mark.parametrize("kind", [Told, Replacing, Rebuilding, Fresh])
def test_a_module_is_told_that_it_was_loaded_and_its_parameters_stay_those_of_the_optimizer(
    kind: Callable[[], nn.Module],
) -> None:
    first, second = kind(), nn.ModuleList([kind()])
    optimizer = torch.optim.SGD(second.parameters(), lr=1.0)
    through_a_file({"m": [first]}, {"m": [second[0]]})
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert held == {id(param) for param in second.parameters()}
    (told,) = (each for each in second.modules() if isinstance(each, Told))
    assert told.heard == ["before", "after"]
    assert told.total == told.weight.sum()


class Lookahead(torch.optim.Adam):
    """Has slow weights, and a state dict of another form than torch's optimizers have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters())
        self.slow = [each.detach().clone() for each in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["inner"])
        self.slow = state["slow"]


def test_an_optimizer_may_have_a_state_dict_of_its_own_form() -> None:
    models = nn.Linear(2, 2), nn.Linear(2, 2)
    first, second = map(Lookahead, models)
    models[0](torch.ones(1, 2)).sum().backward()
    first.step()
    through_a_file({"o": first}, {"o": second})
    assert all(map(torch.equal, first.slow, second.slow))
    (one, _), (other, _) = (each.state.values() for each in (first, second))
    assert torch.equal(one["exp_avg"], other["exp_avg"])


def test_what_a_module_has_let_grow_comes_back_where_it_takes_it() -> None:
    first, second = Growing(), Growing()
    first.rows = torch.ones(3, 2)
    first.seen = {"passes": 3, "late": 1}
    through_a_file({"m": first}, {"m": second})
    assert second.rows.tolist() == [[1, 1]] * 3
    assert second.seen == {"passes": 3, "late": 1}
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        through_a_file({"m": nn.Linear(3, 2)}, {"m": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match="has dtype float32"):
        through_a_file({"m": nn.Linear(2, 2).double()}, {"m": nn.Linear(2, 2)})


def test_a_lazy_module_gets_its_shapes_with_its_values() -> None:
    first, second = nn.LazyLinear(2), nn.LazyLinear(2)
    first(torch.ones(1, 3))
    optimizer = torch.optim.SGD(second.parameters(), lr=1.0)
    through_a_file({"m": first}, {"m": second})
    assert torch.equal(second.weight, first.weight)
    assert optimizer.param_groups[0]["params"][0] is second.weight
    adam, again = (torch.optim.Adam(each.parameters()) for each in (first, nn.LazyLinear(2)))
    first(torch.ones(1, 3)).sum().backward()
    adam.step()
    through_a_file({"m": first, "o": adam}, {"m": nn.LazyLinear(2), "o": again})
    (kept, _) = again.state_dict()["state"].values()
    assert kept["exp_avg"].shape == (2, 3)


def test_a_module_that_a_hook_resets_takes_what_was_saved() -> None:
    first, second = Hooked(), Hooked()
    first.later(torch.ones(1, 3))
    through_a_file({"m": first}, {"m": second})
    assert torch.equal(second.weight, first.weight)
    assert torch.equal(second.later.weight, first.later.weight)


def test_a_dict_with_its_keys_as_attributes_comes_back() -> None:
    class Configuration(dict[str, Any]):
        __getattr__ = dict.__getitem__

    found = through_a_file({"c": Configuration(a=1)}, {"c": Configuration(a=0)})
    assert found == {"c": {"a": 1}}


def test_a_module_may_save_less_than_it_takes() -> None:
    first, second = Brief(), Brief()
    weight = second.weight.detach().clone()
    through_a_file({"m": first}, {"m": second})
    assert torch.equal(second.bias, first.bias)
    assert torch.equal(second.weight, weight)


def test_a_state_dict_says_of_which_version_its_modules_are() -> None:
    first, second = Versioned(), Versioned()
    found = through_a_file({"m": first.state_dict()}, {"m": second.state_dict()})
    second.load_state_dict(found["m"])
    assert torch.equal(second.weight, first.weight)


def test_a_tensor_that_an_object_has_let_grow_comes_back() -> None:
    first, second = History(1.0, 2.0), History()
    through_a_file({"h": first}, {"h": second})
    assert second.values.tolist() == [1.0, 2.0]
    with pytest.raises(CheckpointError, match="has shape"):
        through_a_file({"t": torch.ones(2)}, {"t": torch.ones(3)})


def test_what_came_into_a_state_in_training_comes_back_and_what_does_not_is_named() -> None:
    state = {"best": {"loss": 1.0, "at": 2}, "seen": [3], "ema": {"a": torch.ones(1)}, "m": {}}
    taken = nested.taken(state | {"m": {"a": torch.zeros(1), "b": torch.ones(1)}})
    asked: dict[str, Any] = {"best": {"loss": 9.0}, "m": {"a": torch.ones(1)}}
    found = nested.restored(asked, taken.tree, shards(taken.tensors))
    assert found == {"best": {"loss": 1.0, "at": 2}, "seen": [3], "m": {"a": 0.0, "b": 1.0}}
    assert found["m"]["a"] is asked["m"]["a"]
    assert nested.unasked(asked, taken.tree) == ["state['ema']"]
    assert nested.unasked({}, taken.tree) == []


def test_a_part_of_a_state_may_be_asked_for_and_what_was_not_saved_is_named() -> None:
    state = {"a": torch.ones(2), "b": {"c": 1}}
    assert through_a_file(state, {"b": None}) == {"b": {"c": 1}}
    with pytest.raises(KeyError, match=r"state\['b'\]\['d'\] was not saved"):
        through_a_file(state, {"b": {"c": 0, "d": 0}})
    with pytest.raises(KeyError, match=r"state\['m'\]\['bias'\] was not saved"):
        through_a_file({"m": nn.Linear(2, 2, bias=False)}, {"m": nn.Linear(2, 2)})
    with pytest.raises(KeyError, match=r"state\['m'\]\['bias'\] was saved"):
        through_a_file({"m": nn.Linear(2, 2)}, {"m": nn.Linear(2, 2, bias=False)})


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"f": [print]}, r"state\['f'\]\[0\]: a builtin_function_or_method cannot be saved"),
        ({"s": {1, 2}}, r"state\['s'\]: a set cannot be saved"),
        ({"b": b"x"}, r"state\['b'\]: a bytes cannot be saved"),
        ({1.5: 1}, "state: a key is 1.5"),
        ({"c": torch.ones(1, dtype=torch.complex64)}, r"state\['c'\]: a tensor of torch.complex64"),
        ({"m": torch.empty(1, device="meta")}, r"state\['m'\]: a tensor on the meta device"),
        ({"s": torch.eye(2).to_sparse()}, r"state\['s'\]: a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_would_have_to_be_pickled_is_refused_by_its_place(state: object, words: str) -> None:
    with pytest.raises(nested.UnsavableStateError, match=words):
        nested.taken(state)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, object] = {"step": 1}
    state["all"] = state
    with pytest.raises(nested.UnsavableStateError, match="contains itself"):
        nested.taken(state)


def test_names_that_a_file_has_for_something_else_may_be_keys(tmp_path: Path) -> None:
    state = {"__metadata__": torch.ones(2), "random": {"torch": torch.arange(3, dtype=torch.uint8)}}
    taken = nested.taken(state)
    tensors = taken.tensors | random_tensors(torch.device("cpu"))
    shard = shard_file.write(tmp_path / "shards" / "one", 0, tensors, {})
    with shard_file.opened(tmp_path / "shards" / "one", shard) as reader:
        saved = {name: reader.tensor(name) for name in taken.tensors}
    found = nested.restored(dict.fromkeys(state), taken.tree, shards(saved))
    assert torch.equal(found["__metadata__"], torch.ones(2))
    assert torch.equal(found["random"]["torch"], torch.arange(3, dtype=torch.uint8))


def test_what_no_reader_of_the_format_takes_is_not_written(tmp_path: Path) -> None:
    said = {"meshloom": " " * shard_file.HEADER_BYTES}
    with pytest.raises(shard_file.LongHeaderError, match="make tensors of long lists"):
        shard_file.write(tmp_path / "shards" / "one", 0, {}, said)
    assert list((tmp_path / "shards" / "one").iterdir()) == []


def test_two_places_with_one_name_are_kept_apart() -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    found = through_a_file(state, {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    assert (found["a.b"].item(), found["a"]["b"].item()) == (0.0, 1.0)


HALF: Final = "a\udc80b"


def test_a_key_with_half_a_surrogate_pair_is_saved_and_comes_back(tmp_path: Path) -> None:
    state = {HALF: torch.arange(3.0), "words": {HALF: HALF}, "a\\udc80b": torch.ones(1)}
    taken = nested.taken(state)
    assert taken.outline.encode()
    shard = shard_file.write(
        tmp_path / "shards" / "one", 0, taken.tensors, as_text({"tree": taken.tree})
    )
    with shard_file.opened(tmp_path / "shards" / "one", shard) as reader:
        tree = about_of(reader)["tree"]
        saved = {name: reader.tensor(name) for name in taken.tensors}
    found = nested.restored({HALF: torch.zeros(3)} | dict.fromkeys(state), tree, shards(saved))
    assert found["words"] == {HALF: HALF}
    assert (found[HALF].tolist(), found["a\\udc80b"].tolist()) == ([0, 1, 2], [1])


def test_a_module_whose_name_is_no_unicode_is_refused_by_it(tmp_path: Path) -> None:
    with pytest.raises(shard_file.UnsavableNameError, match=r"rename the module or parameter"):
        shard_file.write(tmp_path / "shards" / "one", 0, {HALF: torch.ones(1)}, {})


def test_tensors_of_a_trainable_whose_names_are_alike_are_kept_apart() -> None:
    state = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, HALF: torch.full((2,), 2.0)}
    found = beside.flattened(state)
    assert all(name.encode() for name in found.tensors)
    document = json.loads(json.dumps(found.document))
    back = beside.restored(document, shards(dict(found.tensors)), {})
    assert (back["a.b"].tolist(), back["a"]["b"].tolist()) == ([0, 0], [1, 1])
    assert back[HALF].tolist() == [2, 2]


PAIR: Final = "\ud800" + "\udc80"


@pytest.mark.parametrize("state", [{PAIR: 1}, {"a": PAIR}], ids=["key", "value"])
def test_what_json_would_change_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(nested.UnsavableStateError, match="not valid Unicode"):
        nested.taken(state)
    with pytest.raises(beside.UnsavableStateError, match="not valid Unicode"):
        beside.flattened(state)
