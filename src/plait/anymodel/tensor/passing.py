"""What passes the sites of a plan, seen in a forward of the plain model.

How large a message over the tensor axis is depends on what comes to its site: tokens, patches of an image, the stream
of an encoder or a decoder.  A batch does not say so, but a forward does.

    plain model ── hooks on what the plan names ──►  {Site: (Passing(shape, trains), ...)}  ──►  plan.predict_tensor

What siblings read enters once, so a site has as many activations as its siblings read different ones.  An activation
*trains* if the backward brings a gradient to it by the modules that read it at the site: a module that only ranks
tokens, say, brings none.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.table.tensor_plan import Passing, Passings, Site
from plait.tensor.plan import Parallel, site_of
from plait.torch_private import tree_flatten, tree_leaves, tree_map, tree_unflatten

OF_OUTPUTS = ("leave", "sum", "gather")
"""Sites of what a module returns; all others are of what it reads."""


class PassingOf:
    """What passes the sites of a plan when a job's model runs a batch; remembered by the shapes in the batch.

    Args:
        build: makes the model, its parameters with values or on meta.
        loss_fn: ``(model, batch) -> scalar``.
    """

    def __init__(self, build: Callable[[], nn.Module], loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        self._build, self._loss_fn = build, loss_fn
        self._one_at_a_time = Lock()  # ranks may be threads that have one job
        self._known: dict[Hashable, Passings | None] = {}

    def __call__(self, batch: Any, parallel: Parallel) -> Passings | None:
        """None: the forward fails, and the engine's own will say what is wrong."""
        sizes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in tree_leaves(batch))
        key = sizes, parallel.sites, tuple(parallel.styles.items())
        with self._one_at_a_time:
            if key not in self._known:
                self._known[key] = None
                with suppress(Exception), torch.random.fork_rng(devices=[]):
                    moved = tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, batch)
                    self._known[key] = passings(_valued(self._build()), self._loss_fn, moved, parallel)
            return self._known[key]


def _valued(model: nn.Module) -> nn.Module:
    """The model with zeros in the place of what is on meta."""
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None and value.is_meta:
                    zeros = torch.zeros_like(value, device="cpu")
                    made = nn.Parameter(zeros, value.requires_grad) if isinstance(value, nn.Parameter) else zeros
                    held[name] = made  # type: ignore[assignment]
    return model


def passings(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, parallel: Parallel) -> Passings:
    """Runs a batch through the plain ``model`` and back, and lists what passes the sites of ``parallel``."""
    seen: Seen = {site: [] for site in parallel.sites}
    with torch.enable_grad():
        with _hooked(model, parallel, seen):
            loss = loss_fn(model, batch)
        if loss.requires_grad:
            loss.backward()
    return {site: tuple(Passing(each.shape, each.trains) for each in found) for site, found in seen.items()}


@dataclass
class SeenActivation:
    """An activation that passed a site."""

    shape: tuple[int, ...]
    trains: bool = False
    """A backward has brought its gradient."""

    def notice(self, gradient: Tensor) -> None:
        self.trains = True


Seen = dict[Site, list[SeenActivation]]


@contextmanager
def _hooked(model: nn.Module, parallel: Parallel, seen: Seen) -> Iterator[None]:
    """Hooks on the modules of a plan that fill ``seen``; they are gone afterwards."""
    entering = _Entering(parallel, seen)
    losses = _Losses(model, parallel, seen)
    handles = [model.register_forward_pre_hook(losses.begins, with_kwargs=True)]
    for name in losses.heads:
        handles.append(model.get_submodule(name).register_forward_hook(partial(losses.after_head, name)))
    for site in parallel.sites:
        if site.kind not in ("enter", "loss"):
            module = model.get_submodule(site.name)
            if site.kind in OF_OUTPUTS or (site.kind == "share" and parallel.styles[site.name].kind == "shared"):
                handles.append(module.register_forward_hook(partial(_after, site, seen)))
            else:
                number = [s for s in parallel.sites if (s.kind, s.name) == (site.kind, site.name)].index(site)
                hook = partial(_before, site, number, seen)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    for name, sites in entering.sites.items():
        module, enters = model.get_submodule(name), partial(entering, sites)
        handles.append(module.register_forward_pre_hook(enters, with_kwargs=True))
    try:
        with losses:
            yield
    finally:
        for handle in handles:
            handle.remove()


def _before(site: Site, number: int, seen: Seen, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """The ``number``-th floating-point tensor that a module is given."""
    if number < len(given := _floats((args, kwargs))):
        seen[site].append(_seen(given[number], site.width if site.kind == "share" else 0))
        return _watched(args, kwargs, number, seen[site][-1])
    return None


def _after(site: Site, seen: Seen, module: nn.Module, args: Any, output: Any) -> None:
    for x in _floats(output)[:1]:
        seen[site].append(_seen(x, site.width if site.kind == "sum" else 0))
        if x.requires_grad:
            x.register_hook(seen[site][-1].notice)


def _watched(args: Any, kwargs: Any, number: int, activation: SeenActivation) -> Any:
    """The arguments of a module, with an alias of its ``number``-th floating-point tensor: others may read it too."""
    leaves, spec = tree_flatten((args, kwargs))
    place = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()][number]
    if leaves[place].requires_grad:
        leaves[place] = leaves[place].view_as(leaves[place])
        leaves[place].register_hook(activation.notice)
    return tree_unflatten(leaves, spec)


def _floats(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]


def _seen(x: Tensor, width: int = 0) -> SeenActivation:
    """With ``width``, of that many numbers in a row: experts may read one activation for each of them."""
    return SeenActivation((x.numel() // width,) if width else tuple(x.shape[:-1]))


class _Entering:
    """Enters what siblings read as the engine does: the tensor that entered last, unchanged, does not enter again.

    Siblings may read activations of several widths, and then there is a site for each.
    """

    def __init__(self, parallel: Parallel, seen: Seen) -> None:
        of: dict[str, dict[int, Site]] = {}
        for site in parallel.sites:
            if site.kind == "enter":
                of.setdefault(site.name, {})[site.width] = site
        head = {name for name, style in parallel.styles.items() if style.kind == "vocabulary"}
        names = [n for n, style in parallel.styles.items() if style.enters or n in head]
        self.sites = {name: of[site_of(name, parallel)] for name in names if site_of(name, parallel) in of}
        self._seen = seen
        self._last: tuple[Site, Tensor, int] | None = None

    def __call__(self, sites: Mapping[int, Site], module: nn.Module, args: Any, kwargs: Any) -> Any:
        (x,) = _floats((args, kwargs))[:1]
        site, last = sites[x.size(-1)], self._last
        if last is None or last[0] != site or last[1] is not x or last[2] != x._version:
            self._last = site, x, x._version
            self._seen[site].append(_seen(x))
        return _watched(args, kwargs, 0, self._seen[site][-1])


class _Losses(TorchFunctionMode):
    """Sees cross-entropy of the head's classes; of a model that is given ``labels``, the logits, which are gathered."""

    def __init__(self, model: nn.Module, parallel: Parallel, seen: Seen) -> None:
        self._site = next((site for site in parallel.sites if site.kind == "loss"), None)
        vocabulary = [n for n, style in parallel.styles.items() if style.kind == "vocabulary"]
        modules: Mapping[str, Any] = {n: model.get_submodule(n) for n in vocabulary}
        self.heads = {n: m.weight.shape[0] for n, m in modules.items() if isinstance(m, nn.Linear)}
        self._seen, self._whole = seen, False
        super().__init__()

    def begins(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._whole = kwargs.get("labels") is not None

    def after_head(self, name: str, module: nn.Module, args: Any, logits: Tensor) -> None:
        if self._whole:
            gathers = Site("gather", name, self.heads[name])
            self._seen.setdefault(gathers, []).append(SeenActivation(tuple(logits.shape[:-1]), logits.requires_grad))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy and self._site is not None:
            logits = args[0] if args else kwargs["input"]
            if not self._whole and logits.size(-1) in self.heads.values():
                self._seen[self._site].append(SeenActivation(tuple(logits.shape[:-1]), logits.requires_grad))
        return func(*args, **kwargs)
