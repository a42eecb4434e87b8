"""The ``Trainer`` of transformers on a tiny Llama, with the callback. Arguments: steps, every."""

import sys
import tempfile
import warnings

import torch
import transformers
from torch.utils.data import Dataset

from meshloom.integrations.transformers import MeshloomCallback

warnings.simplefilter("ignore")
STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12  # of 2 a rank: 3 steps an epoch on 2 ranks

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    transformers.set_seed(1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
    )
    callback = MeshloomCallback(every=EVERY)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Tokens(),
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=callback.resume_from(trainer))


if __name__ == "__main__":
    main()
