"""Operators that are answered as before, against PyTorch's own way."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from fsdp_core.plan import fakes
from fsdp_core.plan.fakes.answers import AnsweringFakes
from fsdp_core.plan.model import Conditions
from fsdp_core.plan.profiling import profile_model
from fsdp_core.plan.study import ModelUnderStudy
from services.worker.rank.models.decoder import Decoder
from tests.plan.suite import SPLIT, VOCAB, ConvNet, Encoder, image_loss, next_token_loss

AGAIN = Conditions(recompute=True)
DECODER = partial(Decoder, dim=32, layers=2, heads=4, vocab=VOCAB)


@pytest.mark.parametrize(
    ("study", "conditions"),
    [
        (ModelUnderStudy(DECODER, next_token_loss), (Conditions("bf16"),)),
        (ModelUnderStudy(DECODER, next_token_loss, tensor_parallel=SPLIT), (Conditions(tp=2),)),
        (ModelUnderStudy(partial(Encoder, 32, 2, tied=True), next_token_loss), (AGAIN,)),
        (ModelUnderStudy(partial(ConvNet, 8, 2), image_loss), (Conditions(),)),
    ],
)
def test_a_profile_is_the_same_when_pytorch_answers_every_operator(
    study: ModelUnderStudy,
    conditions: tuple[Conditions, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The second time everything is known.
    first, second = (profile_model(study, conditions, sizes=(2,)) for _ in range(2))
    monkeypatch.setattr(AnsweringFakes, "_key", lambda *_: None)
    assert first == second == profile_model(study, conditions, sizes=(2,))


def test_a_known_answer_is_a_view_or_its_argument_or_a_tensor_of_its_own() -> None:
    with fakes.without_memory():
        for _ in range(4):
            x = torch.ones(3, 4)
            turned, added, summed = x.t(), x.add_(1), x + x
            assert (turned.shape, turned.stride()) == ((4, 3), (1, 4))
            assert added is x
            owners = {t.untyped_storage()._cdata for t in (x, turned, summed)}
            assert len(owners) == 2


def test_what_a_model_does_in_one_run_is_not_known_in_the_next() -> None:
    class Remembers(nn.Module):
        """Makes its mask when it first runs."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.mask: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None:
                self.mask = torch.ones(8, 8)
            masked: torch.Tensor = self.layer(x) @ self.mask
            return masked

    study = ModelUnderStudy(Remembers, lambda model, batch: model(torch.randn(batch, 8)).sum())
    profiles = [profile_model(study, sizes=(2,)) for _ in range(3)]
    assert profiles[0] == profiles[1] == profiles[2]


def test_an_error_names_the_line_of_the_model_however_often_it_ran() -> None:
    class Raises(nn.Module):
        """Fails in its last block."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x @ torch.ones(3, 3)

    study = ModelUnderStudy(Raises, lambda model, batch: model(torch.randn(batch, 8)).sum())
    with pytest.raises(RuntimeError, match="reduction dim") as raised:
        profile_model(study)
    (line,) = (
        str(entry.statement)
        for entry in raised.traceback
        if entry.name == "forward" and "test_fake" in str(entry.path)
    )
    assert "torch.ones(3, 3)" in line
