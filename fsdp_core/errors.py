"""Every error the engine raises on purpose.

::

    EngineError
    ├── AlreadyShardedError       (AssertionError)       fully_shard twice on one module
    ├── ContainerError            (ValueError)           a container without forward
    ├── ArgumentError             (ValueError)           an argument outside its range
    ├── ArgumentTypeError         (TypeError)            an argument of the wrong kind
    ├── MeshError                 (AssertionError)       a mesh whose axes cannot have these roles
    ├── MeshJoinError             (RuntimeError)         two meshes that are not parts of one
    ├── ParentMeshError           (RuntimeError)         no mesh of two axes to chunk over
    ├── TensorKindError           (AssertionError)       a tensor of another class than is handled
    ├── UnsupportedError          (NotImplementedError)  a feature this version does not have
    ├── PlacementError            (AssertionError)       a dim that a parameter does not have
    ├── SharedParameterError      (ValueError)           one parameter in two groups
    ├── MetaParameterError        (RuntimeError)         training before materialising
    ├── OffloadError              (RuntimeError)         a slice that is not on the host
    ├── RootError                 (RuntimeError)         not the root, no single root, or two roots
    ├── StateError                (AssertionError)       an operation in the wrong state
    ├── NoDeepcopyError           (AssertionError)       a live group cannot be copied
    ├── NonFiniteNormError        (RuntimeError)         clipping by NaN or infinity, if refused
    ├── TicketError               (RuntimeError)         a collective waited for twice
    ├── DesyncError               (RuntimeError)         ranks started different collectives
    ├── PeerError                 (RuntimeError)         a rank that shares memory has ended
    ├── PlanError                 (ValueError)           a plan that does not fit the model or mesh
    └── CheckpointError           (RuntimeError)         state that cannot be saved or filled
        ├── MissingShardError                            part of a tensor is in no saved shard
        ├── OverlappingShardsError                       part of a tensor is in two saved shards
        └── ShardMismatchError                           another shape or dtype than the target

Each also derives from the type that the reference raises in its place, so a script's
``except`` clauses keep working.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of all errors of the engine."""


class AlreadyShardedError(EngineError, AssertionError):
    """`fully_shard` was applied twice to one module."""


class ContainerError(EngineError, ValueError):
    """The module is a container that never runs forward, so nothing would unshard it."""


class ArgumentError(EngineError, ValueError):
    """An argument has the right kind but a value outside its range."""


class ArgumentTypeError(EngineError, TypeError):
    """An argument has the wrong kind."""


class MeshError(EngineError, AssertionError):
    """A mesh lacks the names, axes or ranks that its role needs."""


class MeshJoinError(EngineError, RuntimeError):
    """Two meshes overlap or do not come from one mesh, so no joint mesh exists."""


class ParentMeshError(EngineError, RuntimeError):
    """A mesh was not cut from one of at least two axes, data-parallel and tensor-parallel."""


class TensorKindError(EngineError, AssertionError):
    """A tensor is of another class, or in other pieces, than the operation handles."""


class UnsupportedError(EngineError, NotImplementedError):
    """This version does not support the request."""


class PlacementError(EngineError, AssertionError):
    """A parameter is to be sharded on a dim that it does not have."""


class SharedParameterError(EngineError, ValueError):
    """One parameter would be managed by two groups."""


class MetaParameterError(EngineError, RuntimeError):
    """Parameters are still on the meta device when their values are needed."""


class OffloadError(EngineError, RuntimeError):
    """Slices are on a device, but the offload policy requires them on the host."""


class RootError(EngineError, RuntimeError):
    """The order of first forwards leaves no single root, or a root's method was called elsewhere."""


class StateError(EngineError, AssertionError):
    """An operation was asked of an object in the wrong state."""


class NoDeepcopyError(EngineError, AssertionError):
    """A module with live communication groups cannot be copied."""


class NonFiniteNormError(EngineError, RuntimeError):
    """The total norm of the gradients is NaN or infinite, with `error_if_nonfinite`."""


class TicketError(EngineError, RuntimeError):
    """A ticket's result was requested twice."""


class DesyncError(EngineError, RuntimeError):
    """Ranks of one group have started different collectives."""


class PeerError(EngineError, RuntimeError):
    """A rank with which this one shares memory has ended, or does not answer."""


class PlanError(EngineError, ValueError):
    """A sharding plan does not fit the model or the mesh."""


class CheckpointError(EngineError, RuntimeError):
    """State cannot be listed for saving, or cannot be filled from what was saved."""


class MissingShardError(CheckpointError):
    """Some elements of a tensor are in no saved shard."""


class OverlappingShardsError(CheckpointError):
    """Some elements of a tensor are in more than one saved shard."""


class ShardMismatchError(CheckpointError):
    """A saved shard has another shape or dtype than the tensor to fill."""
