"""The boundary of a stage: where the stream from the stage before comes in, and where it leaves for the next.

    loss_fn(model, batch)                  the user's own call, on every stage; here stage 1 of 3 has blocks.0 and 1
      │
      └► model(tokens)                     the model's own code runs unchanged
           ├► embed       ForeignLayer     returns NotHere, a tensor that no link of this stage may read
           ├► drop(x)                      passes through: NotHere in, NotHere out
           ├► (embed was the last before ours: returns what stage 0 sent)    BoundaryState.enter
           ├► blocks.0    ours             runs; what it is given besides the stream and is NotHere, stage 0 sent too
           ├► blocks.1    ours, the last   its hook raises StageDone ────────────────┐
           ┆  norm, head                   never reached                             │
      ┆  cross_entropy                     never reached                             │
    Stage._call   ◄──────────────────────────────────────────────── except StageDone ┘   goes to stage 2

    backward: y.grad comes from stage 2 ─► autograd ─► Received.backward leaves x.grad with the BoundaryState ─► stage 0

A link that another stage has is a ``ForeignLayer`` and does not compute.  Those before the stage's first link return
``NotHere``, which passes through any code and turns everything made of it into ``NotHere`` too; a link that is given
one would need what another stage has.  The last of them returns what the stage before sent; the code between it and the
first link runs here, once.  The model's own input (tokens, a mask), and what is made of it alone, stays what it is.  On
all but the last stage the call ends after the last link, so what follows the last link of all, and the loss, run on the
last stage alone.  Every call checks that links run in the order in which they are named, each once.

What later links are given besides the stream (a bias table, an encoder's output) is *extra*: the stage that makes it
sends it along.  So the first call for the shapes of a batch goes on behind the stage's last link, on NotHere, to see
what later links get that is made of parameters here.  Later calls go as far as the last of these.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from plait.comm.header import Shape
from plait.engine.forward.context import CurrentForward, in_backward
from plait.engine.forward.interceptor import only_metadata
from plait.engine.pipeline.handover import Form, HandOver, Key, Tree, number_of, shape_of, tree_of, value_of
from plait.engine.pipeline.not_here import NotHere, not_here
from plait.engine.pipeline.stage_model import CHILDREN, ForeignLayer, StageModel


NOTHING = Form(())


class StageDone(Exception):  # noqa: N818 (it is no error)
    """Ends a call of ``loss_fn`` after the stage's last link; hooks that are always called still run."""


class Search(TorchFunctionMode):
    """Sees, in the first call for the shapes of a batch, which tensors are made of what is here (of parameters, of what
    was received), and which of them that have a key are read behind the stage's last link."""

    def __init__(self, boundary: "BoundaryState") -> None:
        super().__init__()
        self._boundary, self._made = boundary, dict[int, Tensor]()
        self.known: dict[int, tuple[Key, int]] = {}
        """The keys of tensors, by ``id``, and their versions."""

    def add(self, value: Any) -> None:
        self._made.update((id(leaf), leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._made or isinstance(tensor, nn.Parameter)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._boundary.output is not None and not only_metadata(func, args, kwargs):
            for tensor in tensors:
                self._boundary.read_behind(tensor)
        out = func(*args, **kwargs)
        if any(tensor in self for tensor in tensors):
            self.add(out)
        return out


class BoundaryState:
    """One microbatch's way over the boundary of a stage, from what the stage before sent, if there is one.

    ``learned``: the form in which the stage hands over, None where that is to be found out.
    """

    def __init__(self, received: HandOver | None = None, learned: Form | None = NOTHING) -> None:
        self.tensors, self.form = ([], NOTHING) if received is None else (list(received.tensors), received.form)
        self.entered = received is None
        self.device = self.tensors[0].device if self.tensors else None
        self.length = self.tensors[0].size(1) if self.tensors and self.tensors[0].dim() > 1 else None
        """Steps of time of a stream [batch, time, width] on this rank, and over all ranks where it is cut in time."""
        self.whole_length = self.length
        self.gradients: dict[int, Tensor] = {}
        """Of the tensors received, by number, as the backward makes them."""
        self.next_link = 0
        self.calls = Counter[str]()
        """Of modules outside of the links, and of links."""
        self.learned, self.search = learned, Search(self) if learned is None else None
        self.values: dict[Key, tuple[Tensor, int]] = {}
        """What goes on besides the stream, with the versions in which it shall go."""
        self.returned = defaultdict(list, {**self.form.returned, **(learned or NOTHING).returned})
        self.shared: list[tuple[Any, list[int]]] = []
        """Lists and dicts that the link which runs was given, and what was in them."""
        self.output: Any = None
        """What the stage's last link returned."""
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._silenced: list[tuple[nn.Module, Any]] = []

    # ---- what comes -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Before the call: what was received is tensors of this stage's graph."""
        numbers = [i for i, t in enumerate(self.tensors) if t.is_floating_point() or t.is_complex()]
        if numbers and torch.is_grad_enabled():
            dummy = torch.zeros((), requires_grad=True, device=self.device)
            entered = cast(Any, Received).apply(dummy, self, numbers, [self.tensors[i] for i in numbers])
            for number, tensor in zip(numbers, entered, strict=True):
                self.tensors[number] = tensor
        if self.search is not None:
            self.search.add(self.tensors)
        for key, number in self.form.values.items():
            if not key.given:
                self.note(key, self.tensors[number])

    def received(self, key: Key) -> Tensor | None:
        number = self.form.values.get(key)
        return None if number is None else self.tensors[number]

    def enter(self, name: str, given: Sequence[Any]) -> Any:
        """For the last foreign layer, of this name: what was received is the model's from here on."""
        if self.entered:
            raise ValueError("a link of the pipeline ran twice, or loss_fn called the model twice: once is right")
        self.entered = True
        for leaf, tensor in enumerate(given):
            value = self.received(Key(name, 0, leaf, True)) if isinstance(tensor, NotHere) else None
            if value is not None:  # code behind the link reads what it was given: now it is here
                try:
                    swap_tensors(tensor, value.view(value.shape))
                except RuntimeError as error:  # there are views of it
                    raise ValueError(
                        f"what the pipeline's link {name!r} is given is read behind it, on the next stage, which cannot put "
                        f"it into place ({error}): let the link return what is read"
                    ) from None
                if self.search is not None:
                    self.search.add(tensor)
        self.returns(name, stream := value_of(self.form.stream, self.tensors))
        return stream

    def stand_in(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """What the call of a module that an earlier stage has returns: shapes and dtypes, and values that were sent."""
        calls, call = self.returned.get(name), self.calls[name]
        self.calls[name] += 1
        if not calls:  # a tensor like the stream
            outputs = (shape_of(leaf) for leaf in tree_leaves(self.output) if isinstance(leaf, Tensor))
            return self.not_here((*self.form.shapes, *outputs)[0])
        tree, shapes = calls[min(call, len(calls) - 1)]
        values = [self.received(Key(name, call, leaf)) for leaf in range(len(shapes))]
        return value_of(tree, [self.not_here(s) if v is None else v for s, v in zip(shapes, values, strict=True)])

    def not_here(self, shape: Shape) -> Tensor:
        sizes, dtype = shape
        if len(sizes) > 1 and sizes[1] == self.length:  # code around the links may ask how long the stream is
            sizes = (sizes[0], cast(int, self.whole_length), *sizes[2:])
        return not_here(sizes, dtype, self.device)

    def take_gradients(self) -> HandOver | None:
        """What the stage before gets, zeros where the backward made none; None on the first stage."""
        if not self.form.shapes:
            return None
        made, self.gradients = self.gradients, {}
        shapes = enumerate(self.form.shapes)
        back = [made[i] if i in made else torch.zeros(s, dtype=t, device=self.device) for i, (s, t) in shapes]
        return HandOver(back, replace(self.form, shapes=tuple(map(shape_of, back))))

    # ---- what goes ------------------------------------------------------------------------------------------------

    def note(self, key: Key, tensor: Tensor) -> None:
        """A tensor that later stages may want."""
        if self.search is not None:
            self.search.known.setdefault(id(tensor), (key, tensor._version))
        elif self._wanted(key):
            self.values[key] = tensor, tensor._version

    def _wanted(self, key: Key) -> bool:
        return self.learned is not None and key in self.learned.values

    def returns(self, name: str, output: Any) -> None:
        """A module here returned this."""
        try:
            tensors: list[Tensor] = []
            tree = tree_of(output, tensors)
        except ValueError:  # for later stages it is a tensor like the stream
            return
        if self.search is not None:
            self.search.add(output)
            self.returned[name].append((tree, [shape_of(tensor) for tensor in tensors]))
        for leaf, tensor in enumerate(tensors):
            self.note(Key(name, self.calls[name], leaf), tensor)
        self.calls[name] += 1

    def read_behind(self, tensor: Tensor) -> bool:
        """A tensor is read behind the stage's last link; whether it goes on under a key of its own."""
        key, version = cast(Search, self.search).known.get(id(tensor), (None, 0))
        if key is not None and tensor._version == version:  # else it is not what the module returned
            self.values.setdefault(key, (self._copy(tensor), 0))
        return key is not None

    def offer(self, name: str, given: Sequence[Any]) -> None:
        """A later link is given these."""
        for leaf, tensor in enumerate(given):
            key = Key(name, 0, leaf, True)
            if isinstance(tensor, NotHere):
                tensor = self.received(key)
            elif not isinstance(tensor, Tensor):
                continue
            elif self.search is None:
                tensor = tensor if self._wanted(key) else None
            elif tensor not in self.search or self.read_behind(tensor):
                continue
            if tensor is not None:
                self.values[key] = self._copy(tensor), 0

    def _copy(self, tensor: Tensor) -> Tensor:
        """One for each version, because code behind may write to it."""
        kept = self._copies.setdefault((id(tensor), tensor._version), (tensor, tensor.clone()))
        return kept[1]

    def hand_over(self) -> HandOver:
        """What goes to the next stage.  ValueError where that is not to be had."""
        stream, more, values = list[Tensor](), list[Tensor](), dict[Key, int]()
        tree = tree_of(self.output, stream)
        for key in sorted(self.values) if self.learned is None else self.learned.values:
            tensor, version = self.values.get(key, (None, 0))
            if tensor is None or tensor._version != version:
                raise ValueError(
                    f"what {key.module!r} is given, or returns, is read behind the boundary of a stage; for an earlier batch "
                    f"it was there, and now it is not, or has been written to in place: let the model make a new tensor"
                )
            values[key] = len(stream) + number_of(tensor, more)
        tensors = [*stream, *more]
        returned = self.returned if self.learned is None else self.learned.returned
        return HandOver(tensors, Form(tuple(map(shape_of, tensors)), tree, values, returned))

    def silence(self, modules: Mapping[str, nn.Module]) -> None:
        """Behind the stage's last link these run no more: there is nothing to compute with."""
        for name, module in modules.items() if not self._silenced else ():
            self._silenced.append((module, vars(module).get("forward")))
            vars(module)["forward"] = partial(self.stand_in, name)

    def leave(self) -> None:
        """The forward is over: what it passed on is others' to keep."""
        for module, forward in self._silenced:
            vars(module).pop("forward") if forward is None else vars(module).update(forward=forward)
        self._silenced = []
        self.tensors, self.values, self.output, self.search, self._copies = [], {}, None, None, {}


class Received(torch.autograd.Function):
    """What came from the stage before, as tensors of the graph, which the model may write to in place.  Their gradients
    go to the ``BoundaryState``; the dummy that is differentiated gets none."""

    @staticmethod
    def forward(
        ctx: Any, dummy: Tensor, boundary: BoundaryState, numbers: Sequence[int], holder: list[Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.boundary, ctx.numbers = boundary, numbers
        ctx.set_materialize_grads(False)
        tensors = tuple(holder)
        holder.clear()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None, None, None]:
        made = zip(ctx.numbers, gradients, strict=True)
        ctx.boundary.gradients = {number: gradient for number, gradient in made if gradient is not None}
        return None, None, None, None


SHARED = MutableMapping, MutableSequence, MutableSet


def _inside(container: Any) -> list[int]:
    return [id(one) for one in (container.values() if isinstance(container, MutableMapping) else container)]


class StageBoundary:
    """The links of a stage's model, told when they run; those of other stages are foreign layers.  On the ``last``
    stage calls run to their end."""

    def __init__(self, part: StageModel, number: int, current: CurrentForward, *, last: bool) -> None:
        self.number, self.current, self.last = number, current, last
        self.links, self.names = part.links, part.chain.links
        self._indices: dict[int, list[int]] = {}
        self._name_of: dict[int, str] = {}
        self._own = {name: module for name, module in part.outside.items() if not isinstance(module, ForeignLayer)}
        for index, name in enumerate(self.names):
            link = part.model.get_submodule(name)
            self._indices.setdefault(id(link), []).append(index)
            if isinstance(link, ForeignLayer):
                link.at_call, link.at_look = self._at_foreign_link, self._at_look
        for link in dict.fromkeys(part.model.get_submodule(self.names[index]) for index in self.links):
            link.register_forward_pre_hook(self._before_link, with_kwargs=True)  # after other hooks of theirs
            link.register_forward_hook(self._after_link)
        for name, module in part.outside.items():
            self._name_of[id(module)] = name
            if isinstance(module, ForeignLayer):
                module.at_call, module.at_look = self._at_foreign_module, self._at_look
            elif not last:
                module.register_forward_hook(self._after_module)
        if not last:
            part.model.register_forward_hook(self._after_model, prepend=True)  # before its units are left

    @property
    def state(self) -> BoundaryState | None:
        """Of the forward that runs."""
        return cast(BoundaryState | None, self.current.context.boundary)

    def _reached(self, module: nn.Module) -> BoundaryState:
        """The boundary of the forward that has come to a link, which must be the next one (else ValueError)."""
        boundary = self.state
        if boundary is None:
            raise ValueError(f"stage {self.number} has only some links of the model: train it by engine.step")
        indices, index = self._indices[id(module)], boundary.next_link
        if index not in indices:
            expected = repr(self.names[index]) if index < len(self.names) else "no more"
            raise ValueError(
                f"the pipeline's link {self.names[indices[0]]!r} ran where {expected} was to come: links run once "
                f"each, in the order in which the model names them, and loss_fn calls the model once"
            )
        boundary.next_link += 1
        return boundary

    # ---- what other stages have -----------------------------------------------------------------------------------

    def _at_foreign_link(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if in_backward():
            raise ValueError(
                "a checkpoint around several links of the pipeline holds links of two stages: checkpoint inside of a "
                "link, or around one"
            )
        boundary, given = self._reached(module), tree_leaves((args, kwargs))
        index, name = boundary.next_link - 1, self.names[boundary.next_link - 1]
        if index + 1 == self.links.start:
            return boundary.enter(name, given)
        if index < self.links.start:
            return boundary.stand_in(name)
        boundary.offer(name, given)
        if not self._goes_on(boundary):
            raise StageDone
        return self._behind(boundary)

    def _at_foreign_module(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name, boundary = self._name_of[id(module)], self.state
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        passing = boundary is not None and (not boundary.entered or boundary.output is not None)
        if boundary is None or in_backward() or not (passing or any(isinstance(leaf, NotHere) for leaf in given)):
            raise ValueError(
                f"{name!r} belongs to no link of the pipeline and was taken to run elsewhere, but stage {self.number} "
                f"calls it: name it among the model's pipeline_links(), or put it into a link"
            )
        return boundary.stand_in(name)

    def _at_look(self, module: nn.Module, what: str) -> None:
        """The model looks into a foreign layer: ValueError after the last link, when another stage has what it wants,
        and at any time where it goes from child to child, which is how hooks are added that collect from all links."""
        boundary = self.state
        behind = boundary is not None and boundary.next_link == len(self.names) and self.last
        if boundary is not None and (behind or what == CHILDREN) and not in_backward():
            name = self._name_of.get(id(module)) or self.names[self._indices[id(module)][0]]
            raise ValueError(
                f"the model's modules are searched, in or behind their forward, for what all of them leave (an auxiliary "
                f"loss, a penalty, outputs of layers): {what} of {name!r} belongs to another stage. Let each link hand on what the loss "
                f"needs in what it returns, and the last one make it; or train without a pipe axis"
            )

    # ---- what this stage has --------------------------------------------------------------------------------------

    def _before_link(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if in_backward():
            return None
        boundary = self._reached(module)
        name = self.names[boundary.next_link - 1]
        boundary.shared = [(one, _inside(one)) for one in (*args, *kwargs.values()) if isinstance(one, SHARED)]
        leaves, spec = tree_flatten((args, kwargs))
        if boundary.next_link == self.links.stop and not self.last:
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and (boundary.search is None or leaf in boundary.search):
                    boundary.note(Key(name, 0, place, True), leaf)
        if not any(isinstance(leaf, NotHere) for leaf in leaves):
            return None
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, NotHere):
                leaves[place] = boundary.received(Key(name, 0, place, True))
                if leaves[place] is None:
                    raise ValueError(
                        f"the pipeline's link {name!r} is given something that is made of what another stage than "
                        f"{self.number} has (a skip connection, or code between links that reaches over one): let each "
                        f"link work on what the link before it returned"
                    )
        return tree_unflatten(leaves, spec)

    def _after_link(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return None
        boundary = cast(BoundaryState, self.state)
        name = self.names[boundary.next_link - 1]
        if any(_inside(one) != before for one, before in boundary.shared):
            raise ValueError(
                f"the pipeline's link {name!r} writes into a list or a dict that it is given: links on other stages "
                f"would not see it; let it return what others need"
            )
        if self.last:
            return None
        boundary.returns(name, output)
        if boundary.next_link < self.links.stop:
            return None
        try:
            tensors: list[Tensor] = []
            tree_of(output, tensors)
        except ValueError as error:
            raise ValueError(f"stage {self.number} ends with {name!r}, which returns {error}") from None
        if not tensors:
            raise ValueError(f"stage {self.number} ends with {name!r}, which returns no tensor: let each link return one")
        if any(isinstance(tensor, NotHere) for tensor in tensors):
            raise ValueError(f"the pipeline's link {name!r} returns something made of what another stage has")
        if not torch._C._is_fwd_grad_enabled():  # inside the forward of an autograd.Function
            raise ValueError(
                f"{name!r}, the last link of stage {self.number}, runs inside an autograd.Function, where nothing is "
                f"recorded (a checkpoint): use checkpoint(..., use_reentrant=False)"
            )
        boundary.output = output
        if not self._goes_on(boundary):
            raise StageDone
        return self._behind(boundary)

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> None:
        boundary = self.state
        if boundary is not None and boundary.output is None and not in_backward():
            boundary.returns(self._name_of[id(module)], output)

    # ---- behind the last link -------------------------------------------------------------------------------------

    def _goes_on(self, boundary: BoundaryState) -> bool:
        """Whether later links are given what this stage makes, or is it to be found out."""
        if boundary.learned is None:
            return True
        given = (key.module for key in boundary.learned.values if key.given)
        return any(self.names.index(name) >= boundary.next_link for name in given)

    def _behind(self, boundary: BoundaryState) -> Any:
        """What stands for the output of the stage's last link, and of later ones."""
        boundary.silence(self._own)
        tree = tree_of(boundary.output, tensors := list[Tensor]())
        return value_of(tree, [boundary.not_here(shape_of(tensor)) for tensor in tensors])

    def _after_model(self, *call: Any) -> None:
        if self.state is not None and self.state.output is not None and not in_backward():
            raise StageDone
