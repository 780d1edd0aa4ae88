"""The boundary of a stage, where the stream from the stage before enters, and where it leaves for the next.

    loss_fn(model, batch)                  the user's own call, on every stage; here stage 1 of 3 has blocks.0 and 1
      │
      └► model(tokens)                     the model's own code runs unchanged
           ├► embed       ForeignLayer     returns NotHere, a tensor that no link of this stage may read
           ├► drop(x)                      passes through: NotHere in, NotHere out
           ├► (embed was the last before ours: returns stage 0's message)    BoundaryState.enter
           ├► blocks.0    ours             runs; NotHere among its other arguments: stage 0 sent the value too
           ├► blocks.1    ours, the last   after its hooks: raises StageDone ────────┐
           ┆  norm, head                   never reached                             │
      ┆  cross_entropy                     never reached                             │
    Stage._call   ◄──────────────────────────────────────────────── except StageDone ┘   goes to stage 2

    backward: y.grad comes from stage 2 ─► autograd ─► Received.backward leaves x.grad with the BoundaryState ─► stage 0

A link of another stage is a ``ForeignLayer`` and does not compute.  Those before the stage's first link return
``NotHere``, which passes through any code and turns every result into ``NotHere`` too.  A link that gets one as an
argument would need a tensor of another stage.  The last of them returns the tensor that the stage before sent, and the
code between it and the first link runs here, once.  The model's own input (tokens, a mask) stays as it is, and so does
everything computed from it alone.  On all but the last stage the call ends after the stage's last link, so the code
after the model's last link, and the loss, run only on the last stage.  Every call checks that links run in the order in
which they are named, each once.

Tensors that later stages read besides the stream (a bias table, an encoder's output, a skip connection) travel along:
see ``boundary_state``.  To find them, the first call for a batch's shapes goes on after the stage's last link.
"""

from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from plait.anymodel.boundary_state import NOTHING, BoundaryState
from plait.anymodel.stage_io import HandOverForm, Key, tree_of, value_of
from plait.anymodel.stage_model import CHILDREN, ForeignLayer, empty, kind_of
from plait.forward.context import CurrentForward, in_backward
from plait.pipeline.blocks import CutProgram
from plait.pipeline.cutting import Cutting
from plait.pipeline.message import Handed, MessageForm, shape_of
from plait.pipeline.not_here import NotHere
from plait.pipeline.p2p import Signature, signature_of
from plait.pipeline.program import Blocks, StageDone
from plait.torch_private import tree_flatten, tree_leaves, tree_unflatten

SHARED = MutableMapping, MutableSequence, MutableSet


def _inside(container: Any) -> list[int]:
    return [id(one) for one in (container.values() if isinstance(container, MutableMapping) else container)]


class UnmodifiedProgram(CutProgram):
    """Runs a stage's part of an unmodified model: its blocks report when they run, and those of other stages are
    foreign layers.  On the last stage, calls run to their end."""

    word = "link"

    def __init__(self, cutting: Cutting, blocks: Blocks, here: range, number: int, current: CurrentForward) -> None:
        super().__init__(cutting, blocks.names, here, number, current)
        self._forms: dict[tuple[Signature, bool], HandOverForm] = {}
        """The forms of messages to the next stage, by the shapes of a batch and the mode (training or not)."""
        self._read: dict[tuple[MessageForm, str], HandOverForm] = {}
        """The forms of received messages."""
        self._kinds = list(map(kind_of, self.modules))
        self._name_of: dict[int, str] = {}
        outside = cutting.outside
        self.own = {name: module for name, module in outside.items() if not isinstance(module, ForeignLayer)}
        """This stage's modules outside of the links; another stage may have a copy, and run it."""
        for link in dict.fromkeys(self.modules):
            if isinstance(link, ForeignLayer):
                link.at_call, link.at_look = self._at_foreign_link, self._at_look
            else:
                link.register_forward_pre_hook(self._before_link, with_kwargs=True)  # after their other hooks
                self.see(link, self._run_link)
        for name, module in outside.items():
            self._name_of[id(module)] = name
            if isinstance(module, ForeignLayer):
                module.at_call, module.at_look = self._at_foreign_module, self._at_look
            else:
                self.see(module, self._run_module)
        if not self.last:
            self.model.register_forward_hook(self._after_model, prepend=True)  # before its units are left

    def forward(self, received: Handed | None, batch: Any, call: Callable[[], Any]) -> Any:
        key = signature_of(batch), self.model.training
        tensors, form = ([], NOTHING) if received is None else (received.tensors, self._form_of(received.form))
        learned = NOTHING if self.last else self._forms.get(key)
        boundary = BoundaryState(tensors, form, learned, self.current.context.length)
        boundary.open()
        self.current.replace(boundary=boundary)
        try:
            with boundary.search or nullcontext():
                loss = call()
            if boundary.output is not None:
                return self._handed(boundary, key)
        except StageDone:
            return self._handed(boundary, key)
        except Exception:
            if boundary.output is not None and boundary.learned is None:
                return self._handed(boundary, key)  # the search after the stage's last block has failed
            raise
        finally:
            self.current.replace(boundary=None)
            self.over(boundary)
        if isinstance(loss, NotHere) and loss.dim() == 0:
            raise ValueError(
                f"loss_fn, or the model after its links, uses a value of another stage (an early link's output, an "
                f"auxiliary loss, a parameter): let the last link make what the loss needs. The links are "
                f"{self.names[0]} to {self.names[-1]}; if other blocks run after them, name all of them in "
                f"pipeline_links()"
            )
        return loss

    def _form_of(self, received: MessageForm) -> HandOverForm:
        key = received, received.more
        if key not in self._read:
            self._read[key] = HandOverForm.read(received)
        return self._read[key]

    def _handed(self, boundary: BoundaryState, key: tuple[Signature, bool]) -> Handed:
        tensors, form = boundary.hand_over()
        known = self._forms.setdefault(key, form)
        return Handed(tensors, (known if known.shapes == form.shapes else form).message)

    @property
    def state(self) -> BoundaryState | None:
        """The state of the running forward."""
        state: BoundaryState | None = self.current.context.boundary
        return state

    def _reached(self, module: nn.Module) -> BoundaryState:
        """Returns the boundary of the forward that has come to a link; raises ValueError unless it is the next one."""
        boundary = self.state
        self.check_next(module, None if boundary is None else boundary.next_link)
        assert boundary is not None
        boundary.next_link += 1
        return boundary

    # ---- what other stages have -----------------------------------------------------------------------------------

    def _at_foreign_link(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        boundary, given = self._reached(module), tree_leaves((args, kwargs))
        index, name = boundary.next_link - 1, self.names[boundary.next_link - 1]
        if index + 1 == self.here.start:
            return boundary.enter(name, given)
        if index < self.here.start:
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
        """Handles a look into a foreign layer.  Raises ValueError after the last link, when another stage has the
        answer, and at any time for a walk from child to child, which adds hooks that collect from all links."""
        boundary = self.state
        behind = boundary is not None and boundary.next_link == len(self.names) and self.last
        if boundary is not None and (behind or what == CHILDREN) and not in_backward():
            name = self._name_of.get(id(module)) or self.names[self.places[id(module)][0]]
            raise ValueError(
                f"the model's modules are searched, in or after their forward, for what all of them leave (an "
                f"auxiliary loss, a penalty, outputs of layers): {what} of {name!r} belongs to another stage. Let each "
                f"link hand on what the loss needs in what it returns, and the last one make it; or train without a "
                f"pipe axis"
            )

    def over(self, boundary: BoundaryState) -> None:
        """Ends the forward: parameters of other stages that were filled in it become placeholders again."""
        boundary.leave()
        if boundary.filled:
            empty(self.model, set(map(id, boundary.filled)))

    # ---- what this stage has --------------------------------------------------------------------------------------

    def _before_link(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if in_backward():
            return None
        boundary = self._reached(module)
        ends_here = boundary.next_link == self.here.stop and not self.last
        boundary.shared, boundary.beside = [], []
        if not (ends_here or kwargs) and len(args) == 1 and type(args[0]) is Tensor:
            return None  # nothing to check: most links only get their stream
        name = self.names[boundary.next_link - 1]
        boundary.shared = [(one, _inside(one)) for one in (*args, *kwargs.values()) if isinstance(one, SHARED)]
        beside = (one for one in (*args[1:], *kwargs.values()) if isinstance(one, Tensor))
        boundary.beside = [(one, one._version) for one in beside if not isinstance(one, NotHere)]
        leaves, spec = tree_flatten((args, kwargs))
        if ends_here:
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
                        f"the pipeline's link {name!r} is given a value that depends on a stage other than "
                        f"{self.number} (a skip connection, or code between links that reaches over one): let each "
                        f"link work on what the link before it returned"
                    )
        return tree_unflatten(leaves, spec)

    def _run_link(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        if in_backward():
            return output
        boundary = self.state
        assert boundary is not None
        name = self.names[boundary.next_link - 1]
        if boundary.shared and any(_inside(one) != before for one, before in boundary.shared):
            raise ValueError(
                f"the pipeline's link {name!r} writes into a list or a dict that it is given: links on other stages "
                f"would not see it; let it return what others need"
            )
        if boundary.beside and any(one._version != version for one, version in boundary.beside):
            returned = {id(leaf) for leaf in tree_leaves(output)}
            if any(one._version != version and id(one) not in returned for one, version in boundary.beside):
                raise ValueError(
                    f"the pipeline's link {name!r} writes in place to a tensor that it is given besides the stream: "
                    f"links on other stages would not see it; let it return what others need"
                )
        if self.last:
            return output
        boundary.returns(name, output)
        if boundary.next_link < self.here.stop:
            return output
        try:
            tensors: list[Tensor] = []
            tree_of(output, tensors)
        except ValueError as error:
            raise ValueError(f"stage {self.number} ends with {name!r}, which returns {error}") from None
        self.check_end(tensors)
        boundary.output = output
        if not self._goes_on(boundary):
            raise StageDone
        return self._behind(boundary)

    def _run_module(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = call(*args, **kwargs)
        boundary, name = self.state, self._name_of[id(module)]
        if boundary is None or boundary.output is not None or in_backward():
            return output
        if name in boundary.form.modules and any(isinstance(leaf, NotHere) for leaf in tree_leaves(output)):
            return boundary.stand_in(name)  # an earlier stage has a copy of the module, and sent its result
        boundary.returns(name, output)
        return output

    # ---- after the last link --------------------------------------------------------------------------------------

    def _goes_on(self, boundary: BoundaryState) -> bool:
        """True if later links get tensors that this stage makes, or if that is yet to be found out."""
        if boundary.learned is None:
            return True
        given = (key.module for key in boundary.learned.values if key.given)
        return any(self.names.index(name) >= boundary.next_link for name in given)

    def _behind(self, boundary: BoundaryState) -> Any:
        """Returns the stand-in for the output of the stage's last link, and of later links: the last output of a link
        of the same class."""
        boundary.silence(self.own)
        for index in reversed(range(boundary.next_link)):
            alike = self._kinds[index] is self._kinds[boundary.next_link - 1]
            if alike and (calls := boundary.returned.get(self.names[index])):
                tree, shapes = calls[-1]
                return value_of(tree, list(map(boundary.not_here, shapes)))
        tree = tree_of(boundary.output, tensors := list[Tensor]())
        return value_of(tree, [boundary.not_here(shape_of(tensor)) for tensor in tensors])

    def _after_model(self, *call: Any) -> None:
        if self.state is not None and self.state.output is not None and not in_backward():
            raise StageDone
