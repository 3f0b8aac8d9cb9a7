"""A wrong option of the process group is refused, with the values that are possible."""

import pytest
from omegaconf import OmegaConf

from tests.utils.ranks.helpers import dist_config
from utils.config_files import CONFIG_DIR
from utils.errors import UserError
from utils.ranks.config import DEFAULT_MEETING, MeetingConfig


def test_a_wrong_option_is_refused_with_the_possible_values() -> None:
    for place in ("udp://here", "tcp://here", "file://here"):
        with pytest.raises(ValueError, match="give env, tcp://host:port or file:///path"):
            dist_config(init_method=place)
    with pytest.raises(ValueError, match="greater than 0"):
        dist_config(rank_weights=[1.0, 0.0])


def test_ranks_read_how_they_meet_from_their_own_command_line() -> None:
    typed = ["lr=1e-4", "--dist.start-timeout-s=20", "++dist.launcher=slurm", "--dist.init_method='tcp://[::1]:29500'"]
    assert MeetingConfig.typed(typed) == MeetingConfig(
        launcher="slurm", init_method="tcp://[::1]:29500", start_timeout_s=20
    )
    assert MeetingConfig.typed(["dist.timeout_s=1", "my.dist.launcher=x"]) == DEFAULT_MEETING
    for wrong in ("++dist.init_method=foo", "dist.launcher=ray", "dist.start_timeout_s=0"):
        with pytest.raises(UserError, match=wrong.strip("+").split("=")[0]):
            MeetingConfig.typed([wrong])


@pytest.mark.parametrize("name", ["pretrain", "evaluate"])
def test_yaml_has_the_defaults_that_ranks_use_before_they_read_it(name: str) -> None:
    in_yaml = OmegaConf.load(CONFIG_DIR / f"{name}.yaml").dist
    assert {key: in_yaml[key] for key in MeetingConfig.model_fields} == DEFAULT_MEETING.model_dump()
