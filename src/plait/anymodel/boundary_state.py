"""The passage of one microbatch over the boundaries of a stage: its input, its stand-ins, its output.

    received   stream ────────────────────► returned by the last foreign layer           enter
               values ─┬─ of a module ────► returned by its foreign layer                stand_in
                       └─ given to a link ► replaces a tensor that this stage cannot make
    links of this stage run
    handed     stream ◄──── the output of the last of them                               output
               values ◄──── the tensors that later stages read                           note, offer

The first call for a batch's shapes finds out which values later stages read.  It goes on after the stage's last link,
on ``NotHere``, to the end of the model; nothing computes there.  Tensors of this stage that the code there reads travel
along, if they have a name that all stages know: a module returned the tensor, or a link gets it as an argument.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.utils import swap_tensors

from plait.anymodel.stage_io import HandOverForm, Key, Tree, number_of, tree_of, value_of
from plait.comm.header import Shape
from plait.forward.interceptor import EngineMode
from plait.pipeline.message import shape_of, shapes_in_words
from plait.pipeline.not_here import NotHere, not_here
from plait.tensor.metadata import only_metadata
from plait.torch_private import tree_leaves

NOTHING = HandOverForm(())
"""The hand-over that the first stage receives, and that the last one makes."""


class Search(EngineMode):
    """Finds, in the first call for a batch's shapes, the tensors that depend on parameters or received tensors here,
    and those among them, if they have a key, that are read after the stage's last link."""

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


def _check_same(name: str, before: tuple[Tree, list[Shape]], now: tuple[Tree, list[Shape]]) -> None:
    """Raises ValueError if a module returned values different from those that later stages know; NaN equals NaN."""
    old, new = (repr(value_of(tree, [shapes_in_words([s]) for s in shapes])) for tree, shapes in (before, now))
    if old != new:
        raise ValueError(
            f"{name!r} returns {new:.200} where it returned {old:.200} for an earlier batch of the same shapes, which "
            f"is what later stages go by: let numbers, text and shapes in it depend on the shapes of the batch only, "
            f"or return a number as a tensor, and pad what varies"
        )


class BoundaryState:
    """The passage of one microbatch over a stage's boundary.

    Args:
        tensors: those from the stage before, in this stage's graph; none on the first stage.
        form: describes them.
        learned: the form in which the stage hands over; None if it is yet to be found out.
        whole_length: steps of time over all ranks, if the stream is cut in time.
    """

    def __init__(
        self, tensors: Sequence[Tensor], form: HandOverForm, learned: HandOverForm | None, whole_length: int
    ) -> None:
        self.tensors, self.form, self.entered = list(tensors), form, not tensors
        self.device = self.tensors[0].device if self.tensors else None
        self.length = self.tensors[0].size(1) if self.tensors and self.tensors[0].dim() > 1 else None
        """Steps of time of a stream [batch, time, width] on this rank."""
        self.whole_length = whole_length or self.length
        self.next_link = 0
        self.calls = Counter[str]()
        """The numbers of calls of modules outside of the links, and of links."""
        self.learned, self.search = learned, Search(self) if learned is None else None
        self.values: dict[Key, tuple[Tensor, int]] = {}
        """Tensors that travel besides the stream, with the versions in which they do."""
        known = {**self.form.returned, **(learned or NOTHING).returned}
        self.returned: dict[str, list[tuple[Tree, list[Shape]]]] = known
        self.shared: list[tuple[Any, list[int]]] = []
        """Lists and dicts that the running link got as arguments, with their contents."""
        self.beside: list[tuple[Tensor, int]] = []
        """Tensors that the running link got besides the stream, with their versions."""
        self.output: Any = None
        """The output of the stage's last link."""
        self.filled: list[Tensor] = []
        """Stand-ins that now have the values that arrived for them."""
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._silenced: list[tuple[nn.Module, Any]] = []

    # ---- what comes -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Notes, before the call, the received values that belong to modules."""
        if self.search is not None:
            self.search.add(self.tensors)
        for key, number in self.form.values.items():
            if not key.given:
                self.note(key, self.tensors[number])

    def received(self, key: Key) -> Tensor | None:
        number = self.form.values.get(key)
        return None if number is None else self.tensors[number]

    def enter(self, name: str, given: Sequence[Any]) -> Any:
        """Gives the model the received stream, as the output of the last foreign layer, which has this name."""
        self.entered = True
        for leaf, tensor in enumerate(given):
            value = self.received(Key(name, 0, leaf, True)) if isinstance(tensor, NotHere) else None
            if value is not None:  # code after the link reads its arguments, which are here now
                try:
                    swap_tensors(tensor, value.view(value.shape))
                except RuntimeError as error:  # there are views of it
                    raise ValueError(
                        f"an argument of the pipeline's link {name!r} is read after it, on the next stage, which "
                        f"cannot put it into place ({error}): let the link return what is read"
                    ) from None
                self.filled.append(tensor)
                if self.search is not None:
                    self.search.add(tensor)
        self.returns(name, stream := value_of(self.form.stream, self.tensors))
        return stream

    def stand_in(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of an earlier stage's module: its shapes and dtypes, with the values that were sent."""
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

    # ---- what goes ------------------------------------------------------------------------------------------------

    def note(self, key: Key, tensor: Tensor) -> None:
        """Notes a tensor that later stages may read."""
        if isinstance(tensor, NotHere) or not (self.search is not None or self._wanted(key)):
            return
        parameter = isinstance(tensor, nn.Parameter)
        goes_on = self._copy(tensor) if parameter else tensor  # read it now: after the links it may be at rest
        if self.search is not None:
            version = tensor._version
            if self.search.known.get(id(tensor), (key, -1))[1] != version:  # new, or written to since
                self.search.known[id(tensor)] = key, version
        else:
            self.values[key] = goes_on, goes_on._version

    def _wanted(self, key: Key) -> bool:
        return self.learned is not None and key in self.learned.values

    def returns(self, name: str, output: Any) -> None:
        """Notes the output of a module here; raises ValueError if later stages rely on another one."""
        call, known, learned = self.calls.get(name, 0), self.returned.get(name, []), self.learned
        self.calls[name] = call + 1
        told = learned is not None and len(self.form.returned.get(name, ())) <= call < len(known)  # by this stage
        tensors: list[Tensor] = []
        try:
            tree = tree_of(output, tensors)
        except ValueError as error:
            if told:
                raise ValueError(f"{name!r}, whose earlier result later stages know, returns {error}") from None
            return  # for later stages it is a tensor like the stream
        shapes = [shape_of(tensor) for tensor in tensors]
        if told and (tree, shapes) != known[call]:
            _check_same(name, known[call], (tree, shapes))
        if self.search is not None:
            self.search.add(output)
            if call == len(known):
                self.returned[name] = [*known, (tree, shapes)]
        if self.learned is None or name in self.learned.modules:
            for leaf, tensor in enumerate(tensors):
                self.note(Key(name, call, leaf), tensor)

    def read_behind(self, tensor: Tensor) -> bool:
        """Notes a read after the stage's last link; returns True if the tensor travels under its own key."""
        key, version = cast(Search, self.search).known.get(id(tensor), (None, 0))
        if key is not None and tensor._version == version:  # otherwise it is not the module's output
            copy = self._copy(tensor)
            parameter = isinstance(tensor, nn.Parameter)
            self.values.setdefault(key, (copy, 0) if parameter else (tensor, version))
        return key is not None

    def offer(self, name: str, given: Sequence[Any]) -> None:
        """Offers the arguments of a later link to the next stages."""
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
        """Copies a tensor once for each version, because later code may write to it.  The copy replaces the tensor that
        was written to: its node is later than the tensor's, and units are gathered in the order of the backward's
        nodes, which must not depend on whether a rank has seen a shape before."""
        kept = self._copies.setdefault((id(tensor), tensor._version), (tensor, tensor.clone()))
        return kept[1]

    def hand_over(self) -> tuple[list[Tensor], HandOverForm]:
        """Returns the tensors for the next stage, and their form; raises ValueError if they cannot be handed over."""
        stream, more, values = list[Tensor](), list[Tensor](), dict[Key, int]()
        tree = tree_of(self.output, stream)
        if self.learned is not None:  # the same one, because a new NaN in it would differ
            tree = self.learned.stream
        for key in sorted(self.values) if self.learned is None else self.learned.values:
            tensor, version = self.values.get(key, (None, 0))
            if tensor is not None and tensor._version != version:
                tensor = self._copies.get((id(tensor), version), (None, None))[1]
            if tensor is None:
                raise ValueError(
                    f"an argument or result of {key.module!r} is read after the boundary of a stage; for an earlier "
                    f"batch it was there, and now it is not, or was written to in place: let the model make a new one"
                )
            try:
                values[key] = len(stream) + number_of(tensor, more)
            except ValueError as error:
                raise ValueError(
                    f"an argument of {key.module!r} is read after the boundary of a stage, and is {error}"
                ) from None
        tensors = [*stream, *more]
        returned = self.returned if self.learned is None else self.learned.returned
        return tensors, HandOverForm(tuple(map(shape_of, tensors)), tree, values, returned)

    def silence(self, modules: Mapping[str, nn.Module]) -> None:
        """Keeps these modules from running after the stage's last link, where there is nothing to compute with."""
        for name, module in modules.items() if not self._silenced else ():
            self._silenced.append((module, vars(module).get("forward")))
            vars(module)["forward"] = partial(self.stand_in, name)

    def leave(self) -> None:
        """Ends the forward and drops its tensors, which now belong to the receivers."""
        for module, forward in self._silenced:
            vars(module).pop("forward") if forward is None else vars(module).update(forward=forward)
        self._silenced = []
        self.tensors, self.values, self.output, self.search, self._copies = [], {}, None, None, {}
