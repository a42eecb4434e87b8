"""The ``Trainer`` of transformers with what follows its evaluations. Arguments: steps, every."""

import sys
import tempfile
import warnings
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset
from transformers.trainer_callback import ExportableState

from meshloom.integrations.transformers import MeshloomCallback

warnings.simplefilter("ignore")
STEPS, EVERY = int(sys.argv[1]), int(sys.argv[2])


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 6  # of 2: 3 steps an epoch

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Decay(transformers.TrainerCallback, ExportableState):
    """Decays weights more with each step."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_begin(
        self,
        args: transformers.TrainingArguments,  # noqa: ARG002 transformers' signature
        state: transformers.TrainerState,  # noqa: ARG002 as above
        control: transformers.TrainerControl,  # noqa: ARG002 as above
        **parts: Any,  # noqa: ANN401 as above
    ) -> None:
        self.steps += 1
        for group in parts["optimizer"].param_groups:
            group["weight_decay"] = float(self.steps)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


class Patient(transformers.EarlyStoppingCallback):
    """Is not made by the arguments that its class exports."""

    def __init__(self) -> None:
        super().__init__(5, 1.0)


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
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={"patience": 0, "factor": 0.8, "threshold": 0.5},
            logging_steps=1,
            logging_nan_inf_filter=False,
            eval_strategy="steps",
            eval_steps=1,
            eval_on_start=True,
            metric_for_best_model="loss",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[callback, Decay(), Patient()],
    )
    trainer.train(resume_from_checkpoint=callback.resume_from(trainer))


if __name__ == "__main__":
    main()
