"""An optimizer's state under parameter names, so that it fits safetensors and survives another order of parameters.

Only state travels. Hyperparameters come from the config: restoring them would undo what a resumed run was just told.
"""

import torch
from torch import Tensor, nn


def export_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], int]:
    """The state tensors as "<name in the state>.<name of the parameter>", and the number of updates made."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {
        f"{key}.{names[parameter]}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    return tensors, optimizer.param_groups[0]["step"]


def import_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], step: int) -> None:
    """The inverse. Raises ValueError where a tensor belongs to no parameter or has another shape."""
    parameters = dict(model.named_parameters())
    kinds = {full_name.split(".", 1)[0] for full_name in tensors}
    if missing := {f"{kind}.{name}" for kind in kinds for name in parameters} - tensors.keys():
        raise ValueError(f"optimizer state {min(missing)} is missing, and {len(missing) - 1} more")
    for full_name, tensor in tensors.items():
        key, name = full_name.split(".", 1)
        if name not in parameters or parameters[name].shape != tensor.shape:
            raise ValueError(f"optimizer state {full_name} {tuple(tensor.shape)} fits no parameter of this model")
        optimizer.state[parameters[name]][key] = tensor.to(parameters[name].device)
    for group in optimizer.param_groups:
        group["step"] = step
