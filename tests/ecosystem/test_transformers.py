"""Models of the transformers library, built from their configurations, train and generate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.ecosystem.engines import OURS, Engine, Trace, compare
from tests.engine.gang import Gangs, RankContext

pytestmark = pytest.mark.ranks

VOCAB = 37


def llama() -> Any:  # noqa: ANN401 - the library's classes are dynamic
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - slow to import

    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=None,
        )
    )


def gpt2() -> Any:  # noqa: ANN401 - the library's classes are dynamic
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 - slow to import

    torch.manual_seed(5)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
    )


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], nn.ModuleList]]] = {
    "llama": (llama, lambda model: model.model.layers),
    "gpt2": (gpt2, lambda model: model.transformer.h),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_under_the_reference(gangs: Gangs, name: str) -> None:
    gangs(2).run(train_model, name)


def test_tied_embeddings_stay_one_parameter_of_the_root(gangs: Gangs) -> None:
    gangs(2).run(look_at_tied)


@pytest.mark.parametrize("name", MODELS)
def test_it_generates_what_the_whole_model_generates(gangs: Gangs, name: str) -> None:
    gangs(2).run(generate, name)


def train_model(ctx: RankContext, name: str) -> None:
    def train(engine: Engine) -> Trace:
        model = sharded(ctx, engine, name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        trace = Trace()
        for step in range(3):
            tokens = tokens_of(ctx, step)
            loss = model(input_ids=tokens, labels=tokens).loss
            torch.autograd.backward(loss)
            trace.note(loss)
            trace.note_all(f"step {step}", model)
            optimizer.step()
            optimizer.zero_grad()
        return trace

    losses = compare(train).losses
    assert len(set(losses)) == 3


def look_at_tied(ctx: RankContext) -> None:
    model = sharded(ctx, OURS, "gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    tokens = tokens_of(ctx, 0)
    torch.autograd.backward(model(input_ids=tokens, labels=tokens).loss)
    model.reshard()
    weight = model.lm_head.weight
    assert weight is model.transformer.wte.weight
    assert isinstance(weight, DTensor)
    assert isinstance(weight.grad, DTensor)
    # The embedding's and the head's gradients are both in it: compare with one process.
    whole = gpt2().to(ctx.device)
    for rank in range(ctx.world):
        each = tokens_of(ctx, 0, rank)
        torch.autograd.backward(whole(input_ids=each, labels=each).loss / ctx.world)
    torch.testing.assert_close(weight.grad.full_tensor(), whole.lm_head.weight.grad)


def generate(ctx: RankContext, name: str) -> None:
    make, _ = MODELS[name]
    prompt = tokens_of(ctx, 9, rank=0)[:2, :4]  # the same everywhere: all ranks stop together
    options = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 6,
        "do_sample": False,
    }
    expected = make().to(ctx.device).generate(prompt, **options)

    def run(engine: Engine) -> Trace:
        model = sharded(ctx, engine, name)
        engine.register_fsdp_forward_method(model, "generate")
        answer = model.generate(prompt, **options)
        assert torch.equal(answer, expected)
        # Generating has left nothing behind that training would stumble on.
        tokens = tokens_of(ctx, 0)
        loss = model(input_ids=tokens, labels=tokens).loss
        torch.autograd.backward(loss)
        trace = Trace()
        trace.note(loss)
        trace.note_all("after", model)
        return trace

    compare(run)


def sharded(ctx: RankContext, engine: Engine, name: str) -> Any:  # noqa: ANN401 - a class of either engine
    make, blocks_of = MODELS[name]
    model = make().to(ctx.device)
    for block in blocks_of(model):
        engine.fully_shard(block, mesh=ctx.mesh)
    return engine.fully_shard(model, mesh=ctx.mesh)


def tokens_of(ctx: RankContext, step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (ctx.rank if rank is None else rank))
    return torch.randint(1, VOCAB, (3, 8), generator=generator).to(ctx.device)
