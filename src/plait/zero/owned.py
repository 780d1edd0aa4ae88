"""The runs of parameters that this rank's optimizer updates."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from plait.table.flat import Run
from plait.table.tensor_cut import TensorCut
from plait.zero.flat_gradient import FlatGradient, view_of
from plait.zero.place import RunPlace
from plait.zero.storage import Flat


@dataclass(eq=False)
class Owned:
    """One run of a parameter that this rank's optimizer updates.

    ``view`` and ``gradient`` have the parameter's shape if the run is all of it, and are flat otherwise.
    """

    name: str
    run: Run
    flat: Flat
    cut: TensorCut | None
    """The parameter's cut over the tensor axis; the run is in this rank's piece of it."""
    view: nn.Parameter
    """A view of the unit's storage, or of its master weights."""
    gradient: Tensor
    """A view of the accumulator, or an adopted gradient, which is a new tensor in each step."""
    converts: bool
    """True if the optimizer has another dtype or device than the sums."""
    whole: bool = False
    """True for the whole of a cut parameter, on the rank that updates it for all (see ``whole_update``)."""

    @property
    def place(self) -> RunPlace:
        """The run's regions in the whole parameter."""
        return RunPlace(self.run, None if self.whole else self.cut, self.flat.tensor_rank)


def owned_runs(gradients: Iterable[FlatGradient]) -> list[Owned]:
    """Every run that the row's optimizer cell gives this rank.  Each ``view`` has its ``Owned`` as ``view.piece``."""
    owned = []
    for g in gradients:
        flat, updated = g.flat, g.flat.updated
        converts = (flat.sum_dtype, flat.rest.device) != (updated.dtype, updated.device)
        runs = (flat.layout.run(index, *flat.optim_place) for index in range(len(flat.cuts)))
        for run, cut in ((run, cut) for run, cut in zip(runs, flat.cuts, strict=True) if run is not None):
            view = nn.Parameter(view_of(run, updated))
            piece = Owned(run.slot.name, run, flat, cut, view, g.piece(run), converts)
            view.piece = piece  # type: ignore[attr-defined]
            g.pieces.append(piece)
            owned.append(piece)
    return owned
