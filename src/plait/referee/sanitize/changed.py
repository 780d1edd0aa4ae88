"""Refuses changes of a model after its engine was built, which plain PyTorch would allow.

A module or parameter that was added, removed or replaced would not train.
"""

from torch import nn

from plait.step.engine import Engine
from plait.torch_private import DisableTorchFunctionSubclass


class ChangedModel:
    """Compares a model's modules and parameters with those that it had when its engine was built."""

    def __init__(self, engine: Engine) -> None:
        self._parts = _parts(engine.model)

    def __call__(self, event: str, engine: Engine) -> None:
        if event != "begun" or (now := _parts(engine.model)) == self._parts:
            return
        changed = [name for name in {**now, **self._parts} if now.get(name) != self._parts.get(name)]
        raise ValueError(
            f"the model was changed after its Engine was built: {', '.join(map(repr, changed[:3]))} (added, removed, "
            f"replaced, or swapped with another tensor). Make such changes first, then build the Engine"
        )


def _parts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Modules and parameters by name: the ids of each object and its tensor."""
    with DisableTorchFunctionSubclass():
        modules = {name: (id(module), 0) for name, module in model.named_modules(remove_duplicate=False)}
        parameters = model.named_parameters(remove_duplicate=False)
        return modules | {name: (id(parameter), parameter._cdata) for name, parameter in parameters}
