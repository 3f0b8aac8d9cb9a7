"""Say which keys of a recipe no longer hold once another architecture is typed."""

import re
from contextlib import suppress

from training.config import PretrainConfig
from training.data import AnySizes
from training.meta_model import num_parameters
from utils.command_line import read_config, typed_keys_and_groups
from utils.composing import compose
from utils.config import flatten
from utils.errors import UserError
from utils.overrides import as_override


def note_on_arch(overrides: list[str], config: PretrainConfig, sizes: AnySizes) -> list[str]:
    """Return a line with what arch=... changes in experiment=..., and the size that results.

    The list is empty if one of the two was not typed, or if the recipe's keys all hold.

    Args:
        config: of these overrides.
        sizes: of its data.
    """
    changed: dict[str, tuple[str, str | None]] = {}
    with suppress(UserError):  # the recipe alone may be wrong, and the run is right
        changed = replaced_keys(overrides)
    if not changed:
        return []
    keys = ", ".join(
        f"{key} {before} -> {now}" if now is not None else f"{key} (it has no such key)"
        for key, (before, now) in changed.items()
    )
    words = [each.lstrip("+").partition("=") for each in overrides]
    arch, experiment = (
        [value for key, _, value in words if key == group and value[:1] != "{"][-1] for group in ("arch", "experiment")
    )
    return [
        f"arch={arch} replaces the architecture of experiment={experiment} and gives "
        f"{num_parameters(config, sizes):,} parameters; keys of the recipe that no longer hold: {keys}"
    ]


def replaced_keys(overrides: list[str]) -> dict[str, tuple[str, str | None]]:
    """Return the keys of arch whose value in the recipe a typed arch=... replaces.

    Typed keys are not among them, nor are options that only the architecture of the recipe has, if
    the recipe itself does not set them.

    Returns:
        {key: (value of the recipe, value of the run)}, as they are typed; None: the architecture of
        the run has no such key.

    Raises:
        UserError: The config is wrong.
    """
    typed = typed_keys_and_groups("pretrain", overrides)
    if not {"arch", "experiment"} <= typed:
        return {}
    without_options = [each for each in overrides if not re.match(r"[+~]*arch(\.|=\{)", each)]
    recipe, chosen, run = (
        dict(flatten({"arch": read_config("pretrain", each)["arch"]}))
        for each in ([e for e in without_options if not e.lstrip("+").startswith("arch=")], without_options, overrides)
    )
    set_by_recipe = compose("pretrain", overrides).keys_of_group["experiment"]
    return {
        key: (as_override(value), as_override(run[key]) if key in run else None)
        for key, value in recipe.items()
        if key != "arch.name"
        and not any(key == each or key.startswith(f"{each}.") for each in typed - {"arch"})
        and (chosen[key] != value and run.get(key) != value if key in chosen else key in set_by_recipe)
    }
