"""A model that takes its time and no processor."""

import threading

import torch

from services.worker.rank.models.decoder import Decoder


class PacedDecoder(Decoder):
    """The built-in decoder, with a rest before each pass.

    Compare its losses with its own: a model that is no built-in one is split into other units.

    Args:
        pace_s: The rest.
        sizes: Of the decoder.
    """

    def __init__(self, pace_s: float, **sizes: int) -> None:
        super().__init__(**sizes)
        self._pace_s = pace_s

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        threading.Event().wait(self._pace_s)
        return super().forward(tokens)
