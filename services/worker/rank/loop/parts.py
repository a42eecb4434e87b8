"""What is trained: a user's ``Trainable``, or one made of the parts that the spec names."""

from collections.abc import Callable

from torch import nn

from meshloom.trainable import Models, Trainable
from services.contract.jobs.specs import JobSpec
from services.worker.rank import registry
from services.worker.rank.models.several import checked_module


class TrainableError(TypeError):
    """A trainable is none, leaves out what nothing else gives, or does what its class does not say."""


class Parts(Trainable):
    """Trains what the spec names: everything but the model is the loop's default.

    Args:
        make: The model's factory, with its arguments.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make

    def build_model(self) -> nn.Module | Models:
        """By the factory."""
        return checked_module(self._make())


def trainable_of(spec: JobSpec, grant: registry.Grant) -> Trainable:
    """What the spec has trained.

    Raises:
        FactoryError: It names no factory, or arguments that it does not take.
        TrainableError: ``trainable.factory`` made something else.
    """
    if spec.model is not None:
        return Parts(registry.bound("model", spec.model, grant=grant))
    if spec.trainable is None:
        raise TrainableError("model: the spec names neither a model nor a trainable")
    made = registry.create("trainable", spec.trainable, grant=grant)
    if not isinstance(made, Trainable):
        raise TrainableError(
            f"trainable.factory made a {type(made).__name__}, not a meshloom.Trainable"
        )
    return made


def built_by_meta(spec: JobSpec, trainable: Trainable) -> bool:
    """Whether the models promise that they may be built on the meta device."""
    if spec.model is None:
        return trainable.meta_init
    return bool(getattr(registry.find("model", spec.model.factory), "meta_init", False))


def made_data(spec: JobSpec, trainable: Trainable, grant: registry.Grant) -> object:
    """What the trainable builds for data, else what the spec's factory makes.

    Raises:
        FactoryError: The spec names no factory, or arguments that it does not take.
        TrainableError: Neither gives any.
    """
    own = trainable.build_data()
    if own is not None:
        return own
    if spec.data is None:
        raise TrainableError(
            f"data: the spec names none, and {type(trainable).__name__}.build_data returns none"
        )
    return registry.create("data", spec.data, offered={"seed": spec.train.seed}, grant=grant)
