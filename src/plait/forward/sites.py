"""Names the sites of a model: the places where its forward draws random numbers.

    one dropout, ``drop``, is a child of every block          call                    site
                                                              model                   ""
        for block in self.blocks: x = block(x)                  blocks.0              blocks.0
            self.drop(x)                                          drop                blocks.0.drop
                                                                blocks.1              blocks.1
                                                                  drop                blocks.1.drop

A site is the name by which the running module reaches the module that it calls.  With several such names (a list of one
block, three times) the n-th call takes the n-th.  A module that the running one does not contain draws as a part of it.
So a site depends on the calls around it, up to the model, and never on a call in another stage of a pipeline.

Stages, recomputation, compiled units and the referee's plain run all use these names.
"""

from collections import defaultdict

from torch import nn

Turns = dict[str, dict[str, int]]
"""For each running site, the number of times that it has called each module with several names in it."""


class Sites:
    """The sites of a whole model, also for stages that have only parts of it."""

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules(remove_duplicate=False))
        names: defaultdict[int, list[str]] = defaultdict(list)
        for name, module in modules.items():
            names[id(module)].append(name)
        self._names = {name: names[id(module)] for name, module in modules.items()}
        self._callable = {name for name, module in modules.items() if type(module).forward is not nn.Module.forward}
        self._inside: dict[tuple[str, str], list[str]] = {}

    def key(self, name: str) -> str:
        """The first of a module's names."""
        return self._names[name][0] if name in self._names else name

    def enter(self, outer: str, name: str, turns: Turns) -> str:
        """Returns the site of a module, given by any of its names, that a site calls; ``turns`` counts the call."""
        inside = self._inside.get((outer, name)) or self.inside(outer, name)
        site = inside[0]
        if len(inside) > 1:
            turn = turns.setdefault(outer, {})
            site = inside[turn.get(site, 0) % len(inside)]
            turn[inside[0]] = turn.get(inside[0], 0) + 1
        if turns and (site != outer or not name):
            turns.pop(site, None)
        return site

    def inside(self, outer: str, name: str) -> list[str]:
        """The module's names in a site with the fewest callable modules in between; the site itself if it has none."""

        def between(inner: str) -> int:
            dots = (i for i, letter in enumerate(inner) if letter == "." and i > len(outer))
            return sum(inner[:i] in self._callable for i in dots)

        inside = [one for one in self._names.get(name, [name]) if one.startswith(f"{outer}." if outer else "")]
        nearest = min(map(between, inside), default=0)
        self._inside[outer, name] = found = [one for one in inside if between(one) == nearest] or [outer]
        return found
