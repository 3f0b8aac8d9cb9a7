"""Options of the process group, for tests."""

from utils.dist.config import DEFAULT_MEETING, DistConfig


def dist_config(**changes: object) -> DistConfig:
    values = {"backend": "auto", "timeout_s": 30.0, "num_threads": None, "rank_weights": []}
    return DistConfig.model_validate(DEFAULT_MEETING.model_dump() | values | changes)
