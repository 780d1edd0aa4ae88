"""A model must stay the one that was wrapped: parameters added, removed or replaced later would silently not train.

A parameter that trained when it was wrapped may be frozen between steps, and thawed again: it keeps its place in the
gradients and in the optimizer's state.  A parameter that was frozen then has no such place.
"""

import torch
from torch import nn


class ModelFingerprint:
    """Remembers which modules and parameters each module had, under which names."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = [(name, module, dict(module._parameters)) for name, module in model.named_modules()]
        self._parameters = list(model.parameters())
        self._flags = [p.requires_grad for p in self._parameters]
        self._trains = dict(zip(map(id, self._parameters), self._flags, strict=True))
        with torch._C.DisableTorchFunctionSubclass():
            self._inside = {id(p): p._cdata for p in self._parameters}
        self._seen = self._look()

    def _look(self) -> list[object]:
        """Everything that ``check`` compares, without names."""
        objects = [
            (*module._modules, *map(id, module._modules.values()), *own, *map(id, own.values()))
            for _, module, _ in self._known
            for own in (module._parameters,)
        ]
        with torch._C.DisableTorchFunctionSubclass():  # parameters at rest answer slowly otherwise
            return [objects, [(parameter.requires_grad, parameter._cdata) for parameter in self._parameters]]

    def check(self) -> bool:
        """True if parameters were frozen or thawed since the last call.

        Raises:
            ValueError: the model was changed after it was wrapped; the module or parameter is named.
        """
        now = self._look()
        if now == self._seen:
            return False
        if change := self._change():
            raise ValueError(
                f"the model was changed after it was wrapped: {change}. Make such changes first, then build the Engine"
            )
        self._seen = now
        return True

    def frozen(self) -> list[str]:
        """The names of the parameters that were frozen since the model was wrapped."""
        with torch._C.DisableTorchFunctionSubclass():
            if [p.requires_grad for p in self._parameters] == self._flags:
                return []
            return [n for n, p in self._model.named_parameters() if self._trains.get(id(p)) and not p.requires_grad]

    def _change(self) -> str:
        now = dict(self._model.named_modules())
        if now.keys() != {name for name, _, _ in self._known}:
            return "modules were added or removed"
        for name, module, parameters in self._known:
            where = name or "the model"
            if now[name] is not module:
                return f"module {where!r} was replaced"
            if changed := sorted(module._parameters.keys() ^ parameters.keys()):
                return f"parameters {changed} of {where} were added or removed"
            for key, parameter in parameters.items():
                if module._parameters[key] is not parameter:
                    return f"parameter {key!r} of {where} was replaced"
                with torch._C.DisableTorchFunctionSubclass():
                    swapped = parameter is not None and parameter._cdata != self._inside[id(parameter)]
                if swapped:  # the object stays, but has lost the engine's attributes
                    return (
                        f"parameter {key!r} of {where} was swapped with another tensor (torch.utils.swap_tensors, or "
                        f"set_swap_module_params_on_conversion(True); engine.load_full_state_dict loads without)"
                    )
                if parameter is not None and parameter.requires_grad and not self._trains[id(parameter)]:
                    return (
                        f"parameter {key!r} of {where} was thawed, which was frozen then, so that no memory was given "
                        f"to its gradient: build the Engine while it trains, and freeze it afterwards"
                    )
        return ""
