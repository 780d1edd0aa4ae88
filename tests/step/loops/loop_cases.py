"""What the tests of loops share: the layouts that each behaviour is tried on."""

from plait.table.mesh import Mesh

LAYOUTS = {
    "none": ("shard=1", "ddp"),
    "ddp": ("shard=2", "ddp"),
    "zero1": ("shard=3", "zero1"),
    "zero2": ("shard=2", "zero2"),
    "zero3": ("shard=3", "zero3"),
    "hsdp": ("replica=2 shard=2", "hsdp"),
    "psdp": ("replica=2 shard=2", "psdp"),
    "pipe": ("pipe=2", "ddp"),
    "pipe and shard": ("pipe=2 shard=2", "zero3"),
}
"""A mesh and a row."""

ALONE = [name for name in LAYOUTS if "pipe" not in name]
"""Those without stages: a loop of one's own has one."""


def layout(name: str) -> tuple[Mesh, str]:
    mesh, row = LAYOUTS[name]
    return Mesh.parse(mesh), row
