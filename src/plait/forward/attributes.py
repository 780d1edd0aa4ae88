"""Settings, counters and flags that a program keeps on its modules in addition to parameters, buffers and modules.

block.alpha = 0.5        a program sets it between steps         every stage's copy follows
"""

from typing import Any

from torch import nn

PLAIN = (bool, int, float, complex, str)
"""Types of values that are compared, and set back, by value."""

_OF_TORCH = frozenset(vars(nn.Module())) | {"_call_impl"}


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Returns a module's attributes, except torch's own and a ``forward`` that is not its method, which the engine sets
    on each stage."""
    found = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
    if "forward" in found and getattr(found["forward"], "__self__", None) is not module:
        del found["forward"]
    return found
