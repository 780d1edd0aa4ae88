"""A wing: runs any unmodified model in a pipeline, as a ``StageProgram``, and under tensor plans.

split_points.py     finds the modules between which a model is cut, and where the rest runs     start here
stage_model.py      the part of a model that one stage has
boundary.py         the program of a stage: how a forward enters and leaves it
boundary_state.py   one microbatch on its way over these boundaries
stage_io.py         encodes values as text for the next stage
context.py          Hugging Face decoders over a context axis
experts.py          their experts, shared over an expert axis

tensor/             tensor plans for code that works on pieces, plans of Hugging Face models, and their checks
"""

from functools import partial

import torch
from torch import nn

from plait.anymodel.boundary import UnmodifiedProgram
from plait.anymodel.split_points import split_points
from plait.anymodel.stage_model import part_of
from plait.anymodel.tensor import ModelPlan, plan_of
from plait.pipeline.cutting import release
from plait.pipeline.program import ModelCut, StagePart

__all__ = ["ModelPlan", "cut", "plan_of"]


def cut(model: nn.Module) -> ModelCut:
    """Cuts an unmodified model; raises ValueError if it has no split points."""
    blocks = split_points(model)

    def part(here: range, taken: set[int], device: torch.device) -> StagePart:
        cutting = part_of(model, blocks, here, taken, device)
        return StagePart(cutting.model, cutting.origin, blocks, partial(UnmodifiedProgram, cutting, blocks, here))

    return ModelCut(blocks, part, partial(release, model))
