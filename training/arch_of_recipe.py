"""Say that a typed architecture replaces that of a recipe."""

import re
from contextlib import suppress

from training.config import PretrainConfig
from training.data import AnySizes
from training.meta_model import num_parameters
from utils.command_line import read_config, typed_keys_and_groups
from utils.errors import UserError


def note_on_arch(overrides: list[str], config: PretrainConfig, sizes: AnySizes) -> list[str]:
    """Return a line with the size that results if arch=... replaces the architecture of
    experiment=..., and its keys with it.

    Args:
        config: of these overrides.
        sizes: of its data.
    """
    if {"arch", "experiment"} <= typed_keys_and_groups("pretrain", overrides):
        recipe = [each for each in overrides if not re.match(r"[+~]*arch(\.|=)", each)]
        with suppress(UserError):  # the recipe alone may be wrong, and the run is right
            before = read_config("pretrain", recipe)["arch"]["name"]
            if before != config.arch.name:
                return [
                    f"arch={config.arch.name} replaces arch={before} of the recipe, with all that the recipe sets for "
                    f"it, and gives {num_parameters(config, sizes):,} parameters"
                ]
    return []
