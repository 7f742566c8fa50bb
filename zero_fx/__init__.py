"""zero_fx: ZeRO as a compiler. `zero_fx.compile(model, stage=3)` and an ordinary PyTorch training loop."""

import pathlib

_root = pathlib.Path(__file__).resolve().parent
if not (_root / "passes").is_dir():
    # A checkout: `passes` and `runtime` stand beside this folder, and are ours only under this name.
    __path__.append(str(_root.parent))

from . import torch_compat as _torch_compat  # noqa: E402, F401  first: it checks the version of PyTorch
from .checkpoint import async_save_checkpoint, save_checkpoint  # noqa: E402
from .checkpoint_load import load_checkpoint  # noqa: E402
from .checkpoint_optimizer import full_optimizer_state_dict  # noqa: E402
from .compile import compile  # noqa: E402, A004
from .config import Config  # noqa: E402
from .from_deepspeed import DeepSpeedConfig, from_deepspeed  # noqa: E402
from .inspect import inspect  # noqa: E402
from .model import full_state_dict  # noqa: E402
from .plan import Candidate, plan  # noqa: E402
from .precision import Precision  # noqa: E402
from .pretrained import load_full_state_dict  # noqa: E402
from .scaler import GradScaler  # noqa: E402

__all__ = ["Candidate", "Config", "DeepSpeedConfig", "GradScaler", "Precision", "async_save_checkpoint", "compile", "full_optimizer_state_dict"]
__all__ += ["from_deepspeed", "full_state_dict", "inspect", "load_checkpoint", "load_full_state_dict", "plan", "save_checkpoint"]
__version__ = "0.1.0"
