"""What mixes cut features in a forward that is not followed, or in ``loss_fn``, is known by its name and its shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from plait.forward.context import CutActivation, ForwardContext, ModuleCall
from plait.forward.mixing import check_mixing
from plait.table.tensor_plan import Style

X = torch.ones(2, 5, 4)


def check(func: Any, *args: Any, style: str = "local", **kwargs: Any) -> None:
    context = ForwardContext(ModuleCall("loss"), cut=CutActivation(8, X.shape))
    check_mixing(func, args, kwargs, context, {"loss": Style(style)}, ())


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (Tensor.sum, ()),
        (Tensor.sum, (-1,)),
        (Tensor.mean, ((1, 2),)),
        (Tensor.norm, ()),
        (Tensor.norm, (2, -1, True)),
        (torch.linalg.norm, (2, -1)),
        (torch.linalg.vector_norm, (2, 2)),
        (F.normalize, (2.0, -1)),
        (F.layer_norm, ((4,),)),
        (F.linear, (torch.ones(3, 4),)),
    ],
)
def test_what_mixes_features_is_refused(func: Any, args: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"in module 'loss' .* 4 of the 8 features"):
        check(func, X, *args)
    check(func, X, *args, style="whole")
    check(func, X[:, 1:], *args)


@pytest.mark.parametrize(
    ("func", "args"), [(Tensor.sum, (1,)), (Tensor.norm, (2, 1)), (F.normalize, ()), (torch.tanh, ())]
)
def test_what_works_along_another_dim_is_not(func: Any, args: tuple[Any, ...]) -> None:
    check(func, X, *args)
