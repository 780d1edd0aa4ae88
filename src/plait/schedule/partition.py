"""The layers of each stage: a model is a chain of links, a stage is a run of them.

    links      embed  block block block block block block  norm head
    even       |------ 5 ------------| |------- 4 -----------|          by count
    by hand    |--------- 6 --------------| |------ 3 -------|          (6, 3): the head is heavy

Stages are contiguous, so that one activation goes from each to the next.
"""

from collections.abc import Sequence
from itertools import accumulate

from plait.schedule.actions import check_sizes


def even(num_links: int, num_stages: int) -> tuple[range, ...]:
    """Returns stages of equally many links, or one more in the first ones; ValueError for more stages than links."""
    check_sizes(num_stages, num_microbatches=1)
    if num_stages > num_links:
        raise ValueError(
            f"{num_stages} stages, but the model has {num_links} links to give them: use at most {num_links} stages, "
            f"or a model of more layers"
        )
    each, more = divmod(num_links, num_stages)
    return by_sizes([each + (stage < more) for stage in range(num_stages)], num_links)


def by_sizes(sizes: Sequence[int], num_links: int) -> tuple[range, ...]:
    """Returns stages with these numbers of links; ValueError if they are not all links, or a stage has none."""
    if sum(sizes) != num_links or min(sizes, default=0) < 1:
        raise ValueError(
            f"a split of {' + '.join(map(str, sizes)) or 'nothing'} = {sum(sizes)} links, but the model has "
            f"{num_links}: give each stage at least one, {num_links} together"
        )
    ends = list(accumulate(sizes))
    return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))
