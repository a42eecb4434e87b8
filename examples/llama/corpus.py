"""Texts of this machine as rows of tokens: no tokens are left over, none are padding."""

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.utils.data import Dataset

HERE = Path(__file__).parent


class Rows(Dataset):
    """Samples ``{"input_ids": [length], "labels": [length]}``: the model shifts the labels itself."""

    def __init__(self, texts: list[str], length: int) -> None:
        tokenizer = Tokenizer.from_file(str(HERE / "config" / "tokenizer.json"))
        tokens = [token for each in tokenizer.encode_batch(texts) for token in each.ids]
        self.rows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def data(package: str = "email", length: int = 128) -> dict[str, Rows]:
    """The sources of a package of Python's standard library; one module in eight validates."""
    folder = Path(sysconfig.get_path("stdlib")) / package
    texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))]
    train = [text for number, text in enumerate(texts) if number % 8]
    return {"train": Rows(train, length), "validation": Rows(texts[::8], length)}
