"""A downloaded model as a checkpoint of ``torch.distributed.checkpoint``."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from meshloom.client.errors import DownloadError


def write_distributed_checkpoint(files: Sequence[Path], folder: Path) -> None:
    """Write the tensors of safetensors files to ``folder``, by their names, in one process.

    Load them with ``torch.distributed.checkpoint.load``. The whole model must fit into memory.

    Raises:
        DownloadError: torch or safetensors is not installed.
    """
    try:
        from safetensors.torch import load_file  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict_saver import (  # noqa: PLC0415 an extra
            save,
        )
    except ImportError as error:
        raise DownloadError(
            "format 'dcp' needs torch and safetensors here: pip install torch safetensors"
        ) from error
    tensors = {
        name: tensor
        for path in files
        if path.suffix == ".safetensors" and not path.name.startswith("ema")
        for name, tensor in load_file(path).items()
    }
    with warnings.catch_warnings():
        # It says that one process writes all, which is what is wanted here.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(tensors, checkpoint_id=folder, no_dist=True)
