"""PyTorch's distributed checkpoints read and write our models, at any world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.ecosystem.engines import OURS, Engine, Trace, compare, sharded_decoder, steps
from tests.engine.gang import Gangs, RankContext
from tests.engine.models import decoder

pytestmark = pytest.mark.ranks


def test_a_full_state_dict_holds_the_whole_model_on_rank_0(gangs: Gangs) -> None:
    gangs(2).run(save_full)


def test_a_full_state_dict_of_rank_0_reaches_all(gangs: Gangs) -> None:
    gangs(2).run(load_from_rank_0)


def test_training_goes_on_from_model_and_optimizer_state_as_the_reference_does(
    gangs: Gangs,
) -> None:
    gangs(2).run(train_interrupted)


def test_what_two_ranks_saved_three_ranks_load(gangs: Gangs, tmp_path: Path) -> None:
    saved = gangs(2).run(save_sharded, str(tmp_path))
    loaded = gangs(3).run(load_sharded, str(tmp_path))
    assert saved[0].keys() == loaded[0].keys()
    assert any("exp_avg" in name for name in saved[0])
    for result in loaded:
        for name, tensor in result.items():
            assert torch.equal(tensor, saved[0][name]), name


def save_full(ctx: RankContext) -> None:
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - it loads the reference
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    model, optimizer = trained(ctx, OURS)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: dict[str, Any] = get_model_state_dict(model, options=options)
    states: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    expected = {n: whole_of(t) for n, t in model.state_dict().items()}
    if ctx.rank > 0:
        assert whole == {}
        return
    assert whole.keys() == decoder().state_dict().keys()
    for name, tensor in whole.items():
        assert not isinstance(tensor, DTensor)
        assert torch.equal(tensor, expected[name]), name
    assert states["state"]["blocks.0.up.weight"]["exp_avg"].shape == (7, 13)


def load_from_rank_0(ctx: RankContext) -> None:
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - it loads the reference
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    source = decoder()
    with torch.no_grad():
        for param in source.parameters():
            param.add_(1.5)
    states = whole_optimizer_state(source)
    model, optimizer = trained(ctx, OURS)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state: dict[str, Any] = dict(source.state_dict()) if ctx.rank == 0 else {}
    set_model_state_dict(model, state, options=options)
    set_optimizer_state_dict(model, optimizer, states if ctx.rank == 0 else {}, options=options)
    expected = source.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(whole_of(tensor), expected[name].to(ctx.device)), name
    moment = optimizer.state[model.blocks[0].up.weight]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert torch.equal(moment.full_tensor(), torch.full((7, 13), 2.0, device=ctx.device))


def whole_optimizer_state(model: nn.Module) -> dict[str, Any]:
    """An optimizer state with names for indices, as rank 0 would have read it from a file."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict  # noqa: PLC0415 - it loads the reference

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    optimizer.step()
    for moments in optimizer.state.values():
        moments["exp_avg"].fill_(2.0)
    return dict(get_optimizer_state_dict(model, optimizer))


def train_interrupted(ctx: RankContext) -> None:
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - it loads the reference
        StateDictOptions,
        get_state_dict,
        set_state_dict,
    )

    def train(engine: Engine) -> Trace:
        model, optimizer = trained(ctx, engine)
        state, optimizer_state = get_state_dict(model, optimizer)
        again, fresh = trained(ctx, engine, steps_done=0)
        # Some parameters are never used, so the optimizer has no state of theirs.
        set_state_dict(
            again,
            fresh,
            model_state_dict=state,
            optim_state_dict=optimizer_state,
            options=StateDictOptions(strict=False),
        )
        trace = steps(ctx, again, fresh, range(2, 4))
        # A third model: what get_state_dict returned is the first one's own memory.
        uninterrupted = steps(ctx, *trained(ctx, engine), range(2, 4))
        assert trace.losses == uninterrupted.losses
        return trace

    compare(train)


def save_sharded(ctx: RankContext, folder: str) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415 - it loads the reference

    model, optimizer = trained(ctx, OURS)
    state = full_state(model, optimizer)
    save(state, checkpoint_id=folder)
    dist.barrier()
    return flat(state)


def load_sharded(ctx: RankContext, folder: str) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - it loads the reference
        StateDictOptions,
        set_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415 - it loads the reference

    model, optimizer = trained(ctx, OURS, steps_done=1)
    state = full_state(model, optimizer)
    load(state, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=False),
    )
    return flat(full_state(model, optimizer))


def trained(ctx: RankContext, engine: Engine, steps_done: int = 2) -> tuple[Any, torch.optim.AdamW]:
    model = sharded_decoder(ctx, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(ctx, model, optimizer, range(steps_done))
    return model, optimizer


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: PLC0415 - it loads the reference

    states, optimizer_states = get_state_dict(model, optimizer)
    return {"model": states, "optimizer": optimizer_states}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Whole tensors by name; every rank must call it."""
    found = {f"model.{n}": whole_of(t) for n, t in state["model"].items()}
    for name, moments in state["optimizer"]["state"].items():
        found.update({f"{name}.{kind}": whole_of(t) for kind, t in moments.items()})
    return found


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
