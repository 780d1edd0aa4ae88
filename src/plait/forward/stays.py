"""Objects of one rank of one world, which are neither copied nor pickled: the engine, and its hooks on a model."""

from typing import NoReturn, SupportsIndex


class StaysHere:
    """Refuses ``copy.deepcopy`` and ``pickle`` of this object, and so of a model that has its hooks."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:  # deepcopy asks this too
        raise ValueError(
            "a model that plait drives cannot be copied or pickled (copy.deepcopy(model), torch.save(model)), nor can "
            "its engine: save engine.full_state_dict(), or load it into a model that was built anew, or copied before "
            "its Engine was built"
        )
