"""A model must stay the one that was wrapped: parameters added, removed or replaced later would silently not train."""

import torch
from torch import nn


class ModelFingerprint:
    """Remembers which modules and parameters each module had, under which names."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known = [(name, module, dict(module._parameters)) for name, module in model.named_modules()]
        self._parameters = list(model.parameters())
        self._trains = {id(p): p.requires_grad for p in self._parameters}
        self._seen = self._look()

    def _look(self) -> list[object]:
        """All that is remembered, without putting names together."""
        objects = [
            (*module._modules, *map(id, module._modules.values()), *own, *map(id, own.values()))
            for _, module, _ in self._known
            for own in (module._parameters,)
        ]
        with torch._C.DisableTorchFunctionSubclass():  # parameters at rest answer slowly otherwise
            return [objects, [parameter.requires_grad for parameter in self._parameters]]

    def check(self) -> None:
        """Raises ValueError, naming the module or parameter, when the model was changed after it was wrapped."""
        if self._look() != self._seen and (change := self._change()):
            raise ValueError(
                f"the model was changed after it was wrapped: {change}. Make such changes first, then build the Engine"
            )

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
                if parameter is not None and parameter.requires_grad != self._trains[id(parameter)]:
                    return f"requires_grad of parameter {key!r} of {where} was changed"
        return ""
