"""A tensor-parallel plan as data: a pattern of module names gives each module a *style*.

A style says how a module's parameters are cut over the tensor axis, and which part of its activations each rank has:

    style             weight                   reads        leaves
    column            [out/tensor, in]         whole        cut in its last dim
    row               [out, in/tensor]         cut          whole (a sum over the ranks)
    gathered          [out/tensor, in]         whole        whole (its pieces are gathered)
    divided           [out, in/tensor]         whole        whole (each rank takes its part of the input; a sum)
    vocabulary        [vocabulary/tensor, D]   tokens       whole (embedding, a sum over the ranks)
                                               whole        logits cut in classes (head)
    sequence          whole, summed            cut in time under sequence parallelism, whole without it
    summed            whole, summed            cut          cut: a norm on each head, for example
    enter             -                        its input becomes whole before its own code sees it

*Whole* means the same on every rank of the axis.  Under sequence parallelism the stream between a row's sum and the
next column is cut in time.  *Summed* means that every rank computes a share of the parameter's gradient, which is
pending(tensor).  ``enter`` is for attention that shapes its heads by the length of its input, under sequence
parallelism.

Modules that draw dropout on cut activations are ``hidden`` (their last dim is cut), ``heads``, ``sequence``, or
``whole``: this places their mask in the mask of one process.

    "blocks.*.attention.query": "column by 16"        whole heads of 16 rows
    "blocks.*.attention.qkv":   "column 8|2|2 by 16"  fused: 8 query, 2 key, 2 value heads, each cut by itself
    "blocks.*.mlp.gate_up":     "column in 2"         fused: two matrices of one size, each cut by itself
    "blocks.*.mlp.down":        "row"

Source: Megatron-LM (Shoeybi et al. 2019), sequence parallelism (Korthikanti et al. 2022).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from plait.messages.wording import did_you_mean


@dataclass(frozen=True)
class StyleKind:
    """The properties of a kind of style."""

    cut_dim: int | None = None
    """The dim of the weight that is cut; None if the weight is whole."""
    enters: bool = False
    """True if it reads a whole activation, which its siblings share."""
    site: str = ""
    """The kind of ``Site`` at which its output travels."""
    counts: bool = False
    """True if the style may have one number, for activations, though it cuts no weight."""
    own_code: bool = False
    """True if the module's own code reads pieces of its parameters, which the plan cuts one by one."""
    sites: Callable[..., Iterable[Site]] | None = None
    """Returns the style's further sites, from ``(name, style, module, parallel, width)``."""
    install: Callable[..., None] | None = None
    """Adds the hooks of a module, from ``(axis, parallel, name, module)``."""


KINDS: dict[str, StyleKind] = {
    "column": StyleKind(0, enters=True),
    "row": StyleKind(1, site="leave"),
    "gathered": StyleKind(0, enters=True, site="gather"),
    "divided": StyleKind(1, site="leave"),
    "vocabulary": StyleKind(0),
    "sequence": StyleKind(),
    "summed": StyleKind(),
    "enter": StyleKind(),
    "hidden": StyleKind(),
    "heads": StyleKind(),
    "whole": StyleKind(),
}
"""The styles; ``vocabulary`` depends on its module: an embedding leaves, a head enters and ends in the loss."""

NO_KIND = StyleKind()

FORWARD, BACKWARD = "tensor forward", "tensor backward"
"""The ledger's phases of messages over the tensor axis; sender and planner share them."""
CONTEXT_FORWARD, CONTEXT_BACKWARD = "context forward", "context backward"
"""The same for the context axis."""
EXPERT_FORWARD, EXPERT_BACKWARD, BALANCE = "expert forward", "expert backward", "expert balance"
"""The same for ranks that share experts, and for the losses of a router."""


@dataclass(frozen=True)
class Style:
    """The role of one module in tensor parallelism."""

    kind: str
    parts: tuple[int, ...] = ()
    """The sizes of a fused output, in grains, or of activations; empty for a single part."""
    grain: int = 1
    """The number of elements that stay together; 1 for any cut."""
    packed: int = 1
    """The number of equal matrices that are stacked along the cut dim."""

    @classmethod
    def parse(cls, text: str, kinds: Mapping[str, StyleKind] = KINDS) -> Style:
        """Parses ``"column"``, ``"column by 16"``, ``"column 8|2|2 by 16"`` or ``"column in 2"``.

        Raises ValueError for a text that is not a style of ``kinds``, TypeError for an object that is not a text.
        """
        if not isinstance(text, str):
            raise TypeError(f"the style {text!r} in a tensor plan: write a text, as in 'column' or 'row by 16'")
        match = re.fullmatch(r"\s*([a-z_]+)(?:\s+([0-9|]+))?(?:\s+by\s+([0-9]+))?(?:\s+in\s+([0-9]+))?\s*", text)
        if match is None:
            raise ValueError(f"cannot read the style {text!r}: write column, 'column by 16' or 'column 8|2|2 by 16'")
        kind, parts, grain, packed = match.groups()
        if kind not in kinds:
            hint = did_you_mean(kind, kinds)
            more = "" if kinds is not KINDS else " (plait.anymodel.ModelPlan has more, for unmodified models)"
            raise ValueError(f"unknown style {kind!r}: {hint}{' ' * bool(hint)}the styles are {', '.join(kinds)}{more}")
        counted = kinds[kind].counts and (parts or "").isdecimal() and not grain and not packed
        if (parts or grain or packed) and kinds[kind].cut_dim is None and not counted:
            cutting = ", ".join(name for name, row in kinds.items() if row.cut_dim is not None)
            raise ValueError(f"style {text!r}: only {cutting} cut a weight, so only they have sizes")
        if parts and kind != "column" and not counted:
            raise ValueError(f"style {text!r}: only column has parts, the sizes of a fused output")
        if packed and (parts or grain or kind not in ("column", "row")):
            raise ValueError(f"style {text!r}: 'in' is for column and row, and goes with no other sizes")
        return cls(kind, tuple(int(p) for p in (parts or "").split("|") if p), int(grain or 1), int(packed or 1))

    @property
    def cut_dim(self) -> int | None:
        """As in ``StyleKind``."""
        return KINDS.get(self.kind, NO_KIND).cut_dim

    @property
    def enters(self) -> bool:
        """As in ``StyleKind``."""
        return KINDS.get(self.kind, NO_KIND).enters

    def __str__(self) -> str:
        parts = f" {'|'.join(map(str, self.parts))}" if self.parts else ""
        packed = f" in {self.packed}" if self.packed > 1 else ""
        return f"{self.kind}{parts}{f' by {self.grain}' if self.grain > 1 else ''}{packed}"


def check_mapping(plan: object) -> None:
    """Raises TypeError unless a plan is a mapping of names."""
    if not isinstance(plan, Mapping) or not all(isinstance(pattern, str) for pattern in plan):
        raise TypeError(
            f"tensor_plan={plan!r}: it maps names of modules to styles, as in {{'blocks.*.up': 'column', "
            f"'blocks.*.down': 'row'}}"
        )


def match_styles(
    plan: Mapping[str, str | Style],
    modules: Iterable[str],
    parameters: Iterable[str],
    kinds: Mapping[str, StyleKind] = KINDS,
) -> dict[str, Style]:
    """Returns the style of every module that a plan names.

    A pattern is the name of a module or parameter; ``*`` matches anything.  A weight or bias names its module.
    Under ``summed`` and ``sequence``, which are properties of parameters, its own name is in the result, as for any
    other parameter.

    Raises:
        ValueError: a pattern matches nothing (the nearest names are given), or a module has two styles.
        TypeError: the plan is not a mapping of texts.
    """
    check_mapping(plan)
    names = list(modules)
    owners = {p: p.rpartition(".")[0] for p in parameters}
    styles: dict[str, tuple[Style, str]] = {}
    for pattern, text in plan.items():
        style = text if isinstance(text, Style) else Style.parse(text, kinds)
        hits = [n for n in names if fnmatchcase(n, pattern)]
        if not hits:
            itself = style.kind in ("summed", "sequence")
            found = [p for p in owners if fnmatchcase(p, pattern)]
            of_module = [not itself and p.rpartition(".")[2] in ("weight", "bias") for p in found]
            hits = list(dict.fromkeys(owners[p] if of else p for p, of in zip(found, of_module, strict=True)))
        if not hits:
            near = _nearest(pattern, [*names, *owners])
            raise ValueError(
                f"the tensor plan names {pattern!r}, which no module or parameter of the model matches; the nearest "
                f"names are {', '.join(near) or 'none'}"
            )
        for name in hits:
            other, by = styles.get(name, (style, pattern))
            if other != style:
                raise ValueError(
                    f"the tensor plan shards {name!r} twice: {by!r} says {str(other)!r}, {pattern!r} says "
                    f"{str(style)!r}; keep one"
                )
            styles[name] = (style, pattern)
    return {name: style for name, (style, _) in styles.items()}


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Returns names like the pattern, with numbers replaced by ``*`` so that layers count once."""
    general = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in names if name)
    wanted = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", pattern)
    return difflib.get_close_matches(wanted, general, n=3, cutoff=0.4)


MESSAGES = {
    # site     sequence parallelism: forward, backward     without: forward, backward
    "enter": (("all_gather", "reduce_scatter"), ("", "all_reduce")),
    "leave": (("reduce_scatter", "all_gather"), ("all_reduce", "")),
    "sum": (("all_reduce", ""), ("all_reduce", "")),
    "split": (("", "all_gather"), ("", "")),
    "unsplit": (("all_gather", ""), ("", "")),
    "gather": (("all_gather", ""), ("all_gather", "")),
    "part": (("", "all_gather"), ("", "all_gather")),
    "share": (("", "all_reduce"), ("", "all_reduce")),
    "loss": (("all_gather", ""), ("all_gather", "")),
}
"""The collectives of a kind of site.  An all_reduce carries the whole activation, ``gather`` and ``part`` its last dim
in pieces, a loss three numbers per token; all others carry the activation in pieces of time."""


@dataclass(frozen=True)
class Site:
    """A place in the model where tensor parallelism sends messages.

    ``enter``: a whole activation comes to column-cut siblings.  ``leave``: a sum over the ranks becomes whole.
    ``sum``: the same, whole also under sequence parallelism.  ``split``: a whole stream is cut in time.  ``unsplit``:
    it becomes whole again, and so does its gradient.  ``gather``: a cut output becomes whole.  ``part``: a whole
    activation is cut in its last dim.  ``share``: cut computation reads a whole activation, whose gradient is a sum.
    ``loss``: cross-entropy over cut classes.
    """

    kind: str
    name: str
    width: int
    """The size of the activation's last dim, whole; 0 for a loss."""
    trains_input: bool = True
    """True if something before the site trains, so that its input needs a gradient."""
