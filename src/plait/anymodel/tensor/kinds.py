"""Styles of modules whose own code works on pieces of parameters, or on lengths of a stream that is cut in time.

    style                 its parameters     reads     leaves
    shared, shared 64     whole              whole     whole; its outputs (the last 64) are read by cut heads
    experts 2             pieces             whole     whole (a sum over the ranks)
    once                  -                  whole     its input, a share, in such code that cuts nothing
    local                 pieces             cut       cut
    split                 -                  its input, whole until here, is cut in time
    unsplit               -                  its input becomes whole, its output is cut in time; inside, nothing is cut

``experts`` and ``local`` are modules with their own parameters and no products that a style could carry out.  Their
parameters are cut by ``column`` (the last dim but one, the only one of a vector) or ``row`` (the last), *in 2* if they
hold two matrices, each cut by itself.  *experts 2*: a token comes once, with 2 routing weights; without a number it
comes once for each expert, without weights.

    "blocks.*.experts.gate_up": "column in 2"         [experts, 2 * hidden / tensor, width]
    "blocks.*.experts.down":    "row"                 [experts, width, hidden / tensor]
    "blocks.*.experts":         "experts 2"

``split`` and ``unsplit`` are for sequence parallelism: for a model that makes positions from its embedding, and for
code that mixes time or routes tokens.  A style is a set of hooks on its module that call ``functions``.
"""

from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from plait.anymodel.tensor.functions import Share, split, unsplit
from plait.table.tensor_plan import KINDS, Site, Style, StyleKind
from plait.tensor import Parallel, TensorAxis
from plait.tensor.axis import Leave
from plait.tensor.cut_weight import changes_stream
from plait.torch_private import DisableTorchFunction, tree_flatten, tree_unflatten

# ---- hooks -------------------------------------------------------------------------------------------------------


def _shares(axis: TensorAxis, name: str, tensors: list[Tensor], last: int | None = None) -> tuple[Tensor, ...]:
    with DisableTorchFunction():
        return cast("tuple[Tensor, ...]", cast(Any, Share).apply(axis, name, last, *tensors))


def _experts(axis: TensorAxis, parallel: Parallel, name: str, module: nn.Module) -> None:
    """Shares the module's inputs, and adds up its outputs."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        leaves, spec = tree_flatten((args, kwargs))
        floats = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        for i, x in zip(floats, _shares(axis, name, [leaves[i] for i in floats]), strict=True):
            leaves[i] = x
        return cast("tuple[Any, Any]", tree_unflatten(leaves, spec))

    def after(module: nn.Module, args: Any, y: Any) -> Tensor:
        if not isinstance(y, Tensor):
            raise ValueError(f"{name!r}, 'experts' in the tensor plan, returns a {type(y).__name__}, no tensor")
        with DisableTorchFunction():
            return cast(Tensor, cast(Any, Leave).apply(y, axis, name, False))

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _shared(axis: TensorAxis, parallel: Parallel, name: str, module: nn.Module) -> None:
    """Shares the module's output, or the last part of it, with the cut code that reads it."""
    last = sum(parallel.styles[name].parts) or None
    module.register_forward_hook(lambda module, args, y: _shares(axis, name, [y], last)[0])


def _once(axis: TensorAxis, parallel: Parallel, name: str, module: nn.Module) -> None:
    """Gives each rank a share of the module's output."""
    module.register_forward_pre_hook(lambda module, args: (args[0] / axis.ways, *args[1:]))


def _split(axis: TensorAxis, parallel: Parallel, name: str, module: nn.Module) -> None:
    """Cuts the module's stream in time."""
    if axis.sequence:
        changes_stream(module, name, "split", lambda x: split(x, axis, name))


def _unsplit(axis: TensorAxis, parallel: Parallel, name: str, module: nn.Module) -> None:
    """Makes the module's stream whole, and cuts it again after it."""
    if not axis.sequence:
        return

    def stream(x: Tensor) -> Tensor:
        whole = unsplit(x, axis, name)
        axis.unsplit = True
        return whole

    def again(module: nn.Module, args: Any, output: Any) -> Any:
        axis.unsplit = False
        axis.left(0)
        y, length = output[0] if isinstance(output, tuple) else output, axis.length
        if not isinstance(y, Tensor) or y.dim() < 3 or y.size(1) != length:
            shape = list(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"{name!r}, 'unsplit' in the tensor plan, returns {shape}, where sequence parallelism has a stream of "
                f"[batch, {length}, width] to cut in time: leave sequence parallelism out"
            )
        with DisableTorchFunction():
            y = split(y, axis, name)
        return (y, *output[1:]) if isinstance(output, tuple) else y

    changes_stream(module, name, "unsplit", stream)
    module.register_forward_hook(again)


# ---- sites -------------------------------------------------------------------------------------------------------


def _sites_of_experts(
    name: str, style: Style, module: nn.Module, parallel: Parallel, width: int
) -> Iterator[Site]:  # fmt: skip
    _check_experts(name, module, parallel)
    own = [parallel.cuts[id(p)] for p in module.parameters(recurse=False) if id(p) in parallel.cuts]
    # widths of input and output: the dim of their matrices that is not cut
    width = next((cut.shape[-1 if cut.dim == len(cut.shape) - 2 else -2] for cut in own if len(cut.shape) > 1), 0)
    copies = 1 if style.parts else next(module.parameters(recurse=False)).shape[0]
    yield Site("sum", name, width * copies)
    yield Site("share", name, width * copies)
    for size in style.parts:
        yield Site("share", name, size)


def _check_experts(name: str, module: nn.Module, parallel: Parallel) -> None:
    """Raises ValueError if a module's code would not compute a share of its output from the pieces."""
    cuts = parallel.cuts
    for short, parameter in module.named_parameters():
        if id(parameter) not in cuts and id(parameter) not in parallel.summed:
            raise ValueError(
                f"the tensor plan says 'experts' for {name!r}, whose outputs are added up, and nothing for "
                f"'{name}.{short}', which would be added once for each rank: say 'column' or 'row' for it"
            )
    own = {n: cuts[id(p)] for n, p in module.named_parameters(recurse=False) if id(p) in cuts}
    hidden = {n: cut.parts[0] if cut.grain == 1 else cut.shape[cut.dim] // cut.grain for n, cut in own.items()}
    if len(set(hidden.values())) != 1:
        raise ValueError(
            f"the tensor plan cuts the matrices of the experts {name!r} in {hidden} features, which do not meet: where "
            f"two matrices are in one, say 'column in 2' (or 'row in 2') for end to end, 'column by 2' for row by row"
        )


def _sites_of_shared(name: str, style: Style, module: Any, parallel: Parallel, width: int) -> Iterator[Site]:
    for size in style.parts or (module.weight.shape[0],):
        yield Site("share", name, size)


def _sites_of_split(name: str, style: Style, module: Any, parallel: Parallel, width: int) -> Iterator[Site]:
    if style.kind == "unsplit":
        yield Site("unsplit", name, width)
    yield Site("split", name, width)


_KINDS = {
    "enter": replace(KINDS["enter"], own_code=True),
    "shared": StyleKind(counts=True, sites=_sites_of_shared, install=_shared),
    "experts": StyleKind(counts=True, own_code=True, sites=_sites_of_experts, install=_experts),
    "once": StyleKind(install=_once),
    "local": StyleKind(own_code=True),
    "split": StyleKind(sites=_sites_of_split, install=_split),
    "unsplit": StyleKind(own_code=True, sites=_sites_of_split, install=_unsplit),
}
MORE_KINDS: Mapping[str, StyleKind] = ChainMap(_KINDS, KINDS)
"""The library's styles, with those of modules whose own code works on pieces."""
