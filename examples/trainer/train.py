"""The Trainer of Hugging Face transformers on a small GPT-2, with one callback for Meshloom.

    torchrun --nproc-per-node 2 examples/trainer/train.py --steps 20
    meshloom submit examples/trainer/job.yaml --code examples/trainer

Under torchrun the callback does nothing. The Trainer is told how many samples each rank takes; of a
fixed number in all, and without dropout, any number of ranks has the same losses.
"""

import argparse
import os
import tempfile
from pydoc_data.topics import topics  # Python's help texts

import torch
import transformers
from torch.utils.data import Dataset

from meshloom.integrations.transformers import MeshloomCallback

LENGTH = 64


class HelpTexts(Dataset):
    """Bytes as tokens."""

    def __init__(self) -> None:
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=40, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step over all ranks")
    arguments = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))

    transformers.set_seed(1)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=None, eos_token_id=None, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    callback = MeshloomCallback(every=arguments.every)
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            use_cpu=not torch.cuda.is_available(),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch // world,
            learning_rate=4e-3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            logging_steps=1,
            dataloader_pin_memory=False,
            save_strategy="no",  # Meshloom saves
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=HelpTexts(),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=callback.resume_from(trainer))


if __name__ == "__main__":
    main()
