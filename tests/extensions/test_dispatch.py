"""Which extension is asked, what it must be able to do, and that Dynamo does not look into it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_core.fsdp1 import DTensorExtensions, FSDPExtensions, dispatch, one_axis, two_axes
from tests.engine.gang import Gangs, RankContext
from tests.extensions.grid import assert_same, grid, numbered, outdated_words, reference


class Spy(FSDPExtensions):
    """Answers every call with what it was asked."""

    def __init__(self) -> None:
        self.knows = True

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, object | None]:
        return tensor + 1, ("spec" if self.knows else None)

    def post_unflatten_transform(self, tensor, param_extension):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 - any
        return "unflatten", tensor, param_extension

    def chunk_tensor(self, *args):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN201 - any
        return "chunk", *args

    def chunk_dtensor(self, *args):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN201 - any
        return "chunk dtensor", *args

    def pre_load_state_dict_transform(self, *args):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN201 - any
        return "load", *args

    def all_gather_dtensor(self, *args):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN201 - any
        return "gather", *args


@pytest.mark.ranks
def test_dispatchers_ask_the_extension_and_else_do_as_the_reference(gangs: Gangs) -> None:
    gangs(4).run(check_dispatch)


def check_dispatch(ctx: RankContext) -> None:
    them = reference().extensions
    mesh = grid(ctx)
    spy = Spy()
    plain = numbered(ctx, 6, 2)
    dt = distribute_tensor(plain, ctx.mesh, [Shard(0)])
    group = ctx.mesh.get_group()
    names_and_args = [
        ("_ext_pre_flatten_transform", (plain,)),
        ("_ext_post_unflatten_transform", (plain, "spec")),
        ("_ext_post_unflatten_transform", (plain, None)),
        ("_ext_chunk_tensor", (plain, ctx.rank, 4, 8, group)),
        ("_ext_chunk_dtensor", (plain, ctx.rank, ctx.mesh)),
        (
            "_ext_pre_load_state_dict_transform",
            (one_axis._create_chunk_sharded_tensor(plain, ctx.rank, 4, 8, group),),
        ),
        ("_ext_all_gather_dtensor", (dt, ctx.mesh)),
    ]
    for spy.knows in (True, False):
        for extension in (None, spy):
            for name, args in names_and_args:
                with outdated_words():
                    theirs = getattr(them, name)(*args, extension)
                ours = getattr(dispatch, name)(*args, extension)
                compare(ours, theirs)
                if extension is not None:
                    dispatch._set_fsdp_extensions(extension)
                    try:
                        compare(getattr(dispatch, name)(*args), theirs)
                    finally:
                        dispatch._set_fsdp_extensions(None)
    # The one given comes before the default.
    real = DTensorExtensions(torch.get_device_module(ctx.device))
    dispatch._set_fsdp_extensions(spy)
    try:
        chunked = dispatch._ext_chunk_dtensor(plain, ctx.rank, mesh["dp_shard"], real)
    finally:
        dispatch._set_fsdp_extensions(None)
    assert_same(chunked, two_axes._chunk_dtensor(plain, ctx.rank, mesh["dp_shard"]))


def compare(ours: object, theirs: object) -> None:
    if isinstance(theirs, tuple):
        assert isinstance(ours, tuple)
        for one, other in zip(ours, theirs, strict=True):
            compare(one, other)
    else:
        assert_same(ours, theirs)


def test_a_subclass_that_lacks_a_method_cannot_be_made() -> None:
    methods = sorted(FSDPExtensions.__abstractmethods__)
    assert methods == [
        "all_gather_dtensor",
        "chunk_dtensor",
        "chunk_tensor",
        "post_unflatten_transform",
        "pre_flatten_transform",
        "pre_load_state_dict_transform",
    ]
    for missing in methods:
        members = {name: getattr(Spy, name) for name in methods if name != missing}
        incomplete = type("Incomplete", (FSDPExtensions,), members)
        with pytest.raises(TypeError, match=missing):
            incomplete()
    assert isinstance(DTensorExtensions(torch.cpu), FSDPExtensions)


@pytest.mark.ranks
def test_abstract_methods_are_those_of_the_reference(gangs: Gangs) -> None:
    gangs(1).run(check_abstract)


def check_abstract(_: RankContext) -> None:
    them = reference().extensions.FSDPExtensions
    assert them.__abstractmethods__ == FSDPExtensions.__abstractmethods__
    for name in them.__abstractmethods__:
        theirs = getattr(them, name).__code__
        ours = getattr(FSDPExtensions, name).__code__
        assert ours.co_varnames[: ours.co_argcount] == theirs.co_varnames[: theirs.co_argcount]


@pytest.mark.ranks
def test_dressing_a_view_is_no_business_of_dynamos(gangs: Gangs) -> None:
    gangs(1).run(check_opaque)


def check_opaque(ctx: RankContext) -> None:
    extension = DTensorExtensions(torch.get_device_module(ctx.device))
    dt = distribute_tensor(numbered(ctx, 4, 4), ctx.mesh, [Shard(0)])
    local, spec = extension.pre_flatten_transform(dt)
    marked = extension.post_unflatten_transform(local, spec)
    assert isinstance(marked, DTensor)
    assert getattr(marked, "_fsdp_flattened", False) is True

    def dress(view: torch.Tensor) -> torch.Tensor:
        return extension.post_unflatten_transform(view * 2, spec)

    from torch._dynamo import exc, reset, testing  # noqa: PLC0415 - loads the reference: only in ranks

    with pytest.raises(exc.Unsupported, match=r"post_unflatten_transform` should not be traced"):
        torch.compile(dress, backend="eager", fullgraph=True)(local.detach())
    counter = testing.CompileCounter()
    result = torch.compile(dress, backend=counter)(local.detach())
    assert_same(result, distribute_tensor(2 * numbered(ctx, 4, 4), ctx.mesh, [Shard(0)]))
    assert counter.frame_count == 1
    assert counter.op_count == 1
    reset()
