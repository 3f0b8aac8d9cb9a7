"""Read the config that a run of any version has stored."""

from typing import Any

from utils.command_line import differences, filled_up, read_config, with_changes
from utils.config import Container, flatten
from utils.config_files import choices, default_groups
from utils.errors import UserError
from utils.ranks.config import DEFAULT_MEETING

# Keys whose default is not what runs did before the key was there: the key, what these runs did,
# and a key and its value that tell which runs these are.
_BEFORE = (("arch.conv_bias", False, "arch.mlp", "conv_swiglu"), ("lr_counts_from", 1, "arch.name", "urm"))

# Keys that runs stored once, and that no longer exist. Whoever removes a key adds it here.
GONE = {
    *("parallel.static_graph", "parallel.find_unused_parameters", "parallel.compression"),
    *("parallel.powersgd_rank", "parallel.powersgd_start_step"),
}


def completed(stored: Container) -> Container:
    """Return a stored config with values for the keys that were added since it was stored.

    How ranks find one another is a matter of each start, and gets its defaults.

    Raises:
        UserError: A value is an interpolation, which could read environment variables.
    """
    for key, value in flatten(stored):
        if "${" in str(value):
            raise UserError(f"the stored config is no run's: {key} is {str(value)[:80]!r}; write its value there")
    stored = {key: value for key, value in stored.items() if key not in GONE}
    for group, options in stored.items():
        if isinstance(options, dict):
            stored[group] = {key: value for key, value in options.items() if f"{group}.{key}" not in GONE}
    names = {group: name_in(stored.get(group), group) for group, _ in default_groups("pretrain")}
    defaults = read_config("pretrain", [f"{group}={name}" for group, name in names.items() if name])
    meeting = {f"dist.{key}": value for key, value in DEFAULT_MEETING.model_dump().items()}
    whole = filled_up(stored, defaults)
    known, leaves = dict(flatten(stored)), dict(flatten(whole))
    before = {key: value for key, value, which, kind in _BEFORE if key not in known and leaves.get(which) == kind}
    return with_changes(whole, before | meeting)


def how_arch_differs(stored: Container, arch: Container) -> str:
    """Return "arch differs in ..." for the arch of a stored config, or "" if it does not."""
    changed = differences(completed(stored)["arch"], arch)
    return f"arch differs in {', '.join(changed)}" if changed else ""


def name_in(options: Any, group: str) -> str | None:
    """Return the name in a group's stored options if it is a file of that group, else None."""
    name = options.get("name") if isinstance(options, dict) else None
    return name if name in choices(group) else None
