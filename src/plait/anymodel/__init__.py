"""A wing: runs any unmodified model in a pipeline, as a ``StageProgram`` of the library, and under tensor plans.

split_points.py     between which modules a model may be cut, and where everything else runs     start here
stage_model.py      the part of a model that one stage has
boundary.py         the program of a stage: where a forward enters it and leaves it
boundary_state.py   one microbatch on its way over these boundaries
not_here.py         stands in for values that another stage has
stage_io.py         values as text, for the next stage
attribute_sync.py   settings of the program's modules, and writes of forwards, on every stage

tensor/             tensor plans for code that works on pieces, plans of Hugging Face models, and their checks
"""

from collections.abc import Sequence

import torch
from torch import nn

from plait.anymodel.attribute_sync import ForwardWrites
from plait.anymodel.boundary import UnmodifiedProgram
from plait.anymodel.split_points import split_points
from plait.anymodel.stage_model import UnmodifiedPart, part_of, release_buffers
from plait.anymodel.tensor import ModelPlan, plan_of
from plait.forward.context import CurrentForward
from plait.forward.random_ops import OwnLayer
from plait.pipeline.cutting import release
from plait.pipeline.program import ModelCut, StagePart

__all__ = ["ModelPlan", "cut", "plan_of"]


def cut(model: nn.Module) -> ModelCut:
    """Cuts a model as it is; ValueError where it tells no split points."""
    blocks, parts = split_points(model), list[UnmodifiedPart]()

    def part(here: range, taken: set[int], device: torch.device) -> StagePart:
        one = part_of(model, blocks, here, taken, torch.device(device))
        parts.append(one)

        def program(number: int, current: CurrentForward) -> UnmodifiedProgram:
            return UnmodifiedProgram(one, blocks, number, current)

        own = tuple(name for name, module in one.cutting.outside.items() if not isinstance(module, OwnLayer))
        return StagePart(one.cutting.model, one.cutting.origin, blocks, here, own, program)

    def release_all(stages: Sequence[StagePart]) -> None:
        release(model, stages)
        release_buffers(model, parts)

    def copies() -> ForwardWrites:
        return ForwardWrites(one.copies for one in parts)

    return ModelCut(blocks, part, release_all, copies)
