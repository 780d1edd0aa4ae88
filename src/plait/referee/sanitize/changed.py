"""Changes of a model after its engine was built, which plain PyTorch would allow.

A module or parameter that was added, removed or replaced would not train.  A hook that was put on a parameter's
gradient would see None.
"""

from typing import Any, cast

from torch import nn

from plait.step.engine import Engine
from plait.torch_private import DisableTorchFunctionSubclass
from plait.zero.gradients import GradientHook
from plait.zero.unit import parameters_of


class ChangedModel:
    """Compares a model's modules and parameters with those that it had when its engine was built."""

    def __init__(self, engine: Engine) -> None:
        self._parts = _parts(engine.model)

    def __call__(self, event: str, engine: Engine) -> None:
        if event != "begun":
            return
        if late := _late_hook(engine):
            raise ValueError(
                f"a hook was put on {late!r} by register_post_accumulate_grad_hook after its Engine was built: it "
                f"would run when the engine has taken the gradient, and see None. Register it before, for the "
                f"gradient of a rank's microbatch, or look at the sums with a listener"
            )
        if (now := _parts(engine.model)) == self._parts:
            return
        changed = [name for name in {**now, **self._parts} if now.get(name) != self._parts.get(name)]
        raise ValueError(
            f"the model was changed after its Engine was built: {', '.join(map(repr, changed[:3]))} (added, removed, "
            f"replaced, or swapped with another tensor). Make such changes first, then build the Engine"
        )


def _parts(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Modules and parameters by name: each object, and its tensor."""
    with DisableTorchFunctionSubclass():
        modules = {name: (id(module), 0) for name, module in model.named_modules(remove_duplicate=False)}
        parameters = model.named_parameters(remove_duplicate=False)
        return modules | {name: (id(parameter), parameter._cdata) for name, parameter in parameters}


def _late_hook(engine: Engine) -> str | None:
    """The name of a parameter with a hook that runs after the engine's."""
    with DisableTorchFunctionSubclass():
        for name, parameter, _, _ in parameters_of(engine.placed.units):
            hooks = list((cast(Any, parameter)._post_accumulate_grad_hooks or {}).values())
            if hooks and not isinstance(hooks[-1], GradientHook):
                return name
    return None
