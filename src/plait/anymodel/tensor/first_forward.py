"""The first forward of a model under a plan of ``anymodel``, in training and in evaluation: what is cut is followed.

Cut weights and hooks work on pieces themselves: they say what they leave.  It also looks at the first gradients of what
the plan sums over the ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.anymodel.tensor.follow import FollowCuts
from plait.anymodel.tensor.marks import STEPS, Cut, cut_of
from plait.anymodel.tensor.shares import SharesCheck
from plait.forward.stays import StaysHere
from plait.table.tensor_plan import Style
from plait.tensor import Parallel
from plait.tensor.cut_weight import CutSite, CutWeight

Function = Callable[..., Any]

FREE = {"whole", "shared", "experts", "local"}
"""Styles of modules whose own code works on pieces, or on what is whole."""

RESHAPES = {Tensor.reshape, torch.reshape}
DRAWS = {F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.scaled_dot_product_attention}
ALONGSIDE = RESHAPES | DRAWS
"""What is followed as one function: torch works out a -1 before it reshapes, and a rank makes its slice of a mask."""


class FirstForward(FollowCuts, StaysHere):
    """The ``watch`` of an axis; ``on`` while a forward is followed."""

    def __init__(self, model: nn.Module, parallel: Parallel, axis: Any) -> None:
        super().__init__(self._running)
        self.on = False
        self._parallel, self._axis = parallel, axis
        self._experts = tuple(f"{name}." for name, style in parallel.styles.items() if style.kind == "experts")
        owners = {name for name, style in parallel.styles.items() if parallel.kind(style).own_code}
        own = {id(p) for name, p in model.named_parameters() if name.rpartition(".")[0] in owners}
        self._alongside = _Alongside(self, own)
        self._seen: set[bool] = set()
        self._shares = SharesCheck(axis)
        model.register_forward_pre_hook(self._begins)
        model.register_forward_hook(self._ends, always_call=True)
        self._watch_shares(model)

    def _watch_shares(self, model: nn.Module) -> None:
        styles, default = self._parallel.styles, Style("sequence" if self._axis.sequence else "summed")
        for name, parameter in model.named_parameters():
            owner = styles.get(name.rpartition(".")[0], default)
            if id(parameter) in self._parallel.summed and owner.kind == "summed":  # parts of the time may be the same
                self._shares.watch(parameter, name, owner)
        for name, module in model.named_modules():
            if (style := styles.get(name)) is not None and style.kind == "shared":
                module.register_forward_hook(self._watching(name, style))

    def _watching(self, name: str, style: Style) -> Any:
        def hook(module: nn.Module, args: Any, y: Tensor) -> None:
            self._shares.watch(y, name, style, sum(style.parts) or None)

        return hook

    def _begins(self, module: nn.Module, args: Any) -> None:
        if module.training not in self._seen and not self.on:
            self._seen.add(module.training)
            self.on = True
            self._alongside.__enter__()  # type: ignore[no-untyped-call]
            self.__enter__()

    def _ends(self, *call: Any) -> None:
        if self.on:
            self.on = False
            self.__exit__(None, None, None)
            self._alongside.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _running(self) -> str | None:
        name = self._axis.module
        style = self._parallel.styles.get(name)
        free = style is not None and style.kind in FREE
        return None if free or name.startswith(self._experts) else name or "the model"

    def carry(self, site: CutSite, x: Tensor, product: Callable[[], Tensor]) -> Tensor:
        """A cut weight multiplies ``x``."""
        if not self.on:
            return product()
        if site.style.cut_dim == 1:
            wanted = site.sizes()
            if site.style.kind == "row":
                self.check_meets(x, wanted, site.name, str(site.style))
        with self.paused():
            y = product()
        if site.style.kind == "column":
            self.mark(y, -1, Cut(site.name, site.cut.shape[0], site.sizes(), site.style.grain))
        elif site.style.cut_dim == 1 or (site.siblings is None and not site.whole_stream):
            return self.in_time(y, site.name)
        return y

    def check_linear(self, x: Tensor) -> None:
        """Raises ValueError where a whole product multiplies features of which this rank has a part."""
        cut, where = cut_of(self.dims(x)[-1]) if x.dim() else None, self._running()
        if cut is not None and where is not None:
            self.refusals.refuse(
                "linear", cut, "multiplies", f"say 'row' for {where!r} in the tensor plan", "its weight is whole"
            )

    def in_time(self, x: Tensor, name: str) -> Tensor:
        """A stream that was left here, which sequence parallelism cuts."""
        if self.on and self._axis.sequence:
            self.mark(x, 1, Cut(name, self._axis.length, (x.size(1),), unit=STEPS))
        return x


class _Alongside(TorchFunctionMode):
    """Sees the functions that are followed as one, and those that read a piece in a module's own code."""

    def __init__(self, first: FirstForward, pieces: set[int]) -> None:
        super().__init__()
        self._first, self._pieces = first, pieces

    def __torch_function__(
        self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, first = kwargs or {}, self._first
        if self._pieces and any(id(x) in self._pieces for x in (*args, *kwargs.values())):
            with first.paused():
                return func(*args, **kwargs)
        if func is F.linear and not isinstance(args[1] if len(args) > 1 else kwargs["weight"], CutWeight):
            first.check_linear(args[0] if args else kwargs["input"])
        if func not in ALONGSIDE:
            return func(*args, **kwargs)
        x: Tensor = args[0] if args else kwargs["query" if func is F.scaled_dot_product_attention else "input"]
        if func in RESHAPES:
            shape = args[1:] or (kwargs["shape"],)
            first.check_view(x, shape[0] if isinstance(shape[0], tuple | list) else shape)
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and not (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)):
            return func(*args, **kwargs)
        with first.paused():
            y = func(*args, **kwargs)
        first.same(x, y)
        return y
