"""What a sweep is: its config, with what was typed, and the command line of each of its runs."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, QuotedString, RangeSweep
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from search.config import OWN_KEYS, SweepConfig, key_of
from search.space import Point, Space, overrides_of
from utils.command_line import filled_up, read_config, validate
from utils.composing import compose
from utils.config import Container, StrictModel, page
from utils.config_files import names_file
from utils.errors import UserError
from utils.files import file_errors, read_plain_yaml, write_atomically, writing
from utils.overrides import as_override, parse_override
from utils.run.folder import CHECKPOINTS

SWEEPS = CHECKPOINTS / "sweeps"
DEFAULT_TRIALS = 50
_FILE = "sweep.yaml"
# These make a study what it is. The other keys may change from one start to the next.
_IDENTITY = ("overrides", "parameters", "points", "seeds", "metric", "direction")


def _key_of_value(names: Sequence[str]) -> tuple[str, str]:
    """Return the page and the key that say whether a value is text: the sweep's, or its runs'."""
    if names[1:2] not in (["parameters"], ["points"]):
        return "sweep", ".".join(names)
    keys = [name for name in names[2:] if name not in ("values", "when")]
    return "pretrain", keys[-1] if keys else ""


@page("sweep", bare="sweep", passes_on="pretrain", text_key=_key_of_value)
class SweepPage(StrictModel):
    """config/sweep.yaml as a whole, so that messages name its keys as they are typed."""

    sweep: SweepConfig


class Sweep:
    """A sweep, and where it lives.

    Attributes:
        config: without nulls for the name and the path.
    """

    def __init__(self, config: SweepConfig) -> None:
        assert config.name is not None and config.path is not None
        self.config, self.name, self.path = config, config.name, Path(config.path)
        self.space = Space(config.parameters, config.points)

    @staticmethod
    def read(typed: list[str], again: Container | None = None) -> "Sweep":
        """Read a sweep from what was typed: sweep=..., keys of the sweep, and keys of its runs.

        A key of the runs with several values (lr=1e-4,2e-4) becomes a parameter. With one value it
        is the same for all trials, also if the file searches it.

        Args:
            typed: overrides.
            again: values for keys of the sweep in place of the defaults.

        Raises:
            UserError: A key or a value is wrong, or there is nothing to search.
        """
        typed = [each.lstrip("+") for each in typed]
        own = [each for each in typed if re.match(r"sweep[.=]", each)]
        if parameter := next((each for each in own if re.match(r"sweep\.parameters\b", each)), None):
            raise UserError(f"{parameter!r}: type the key itself with several values (lr=1e-4,2e-4), or write a file")
        container, given = read_config("sweep", own)["sweep"], {*map(key_of, own)}
        container |= {key: value for key, value in (again or {}).items() if f"sweep.{key}" not in given}
        parameters, seeds, overrides = _of_runs([each for each in typed if each not in own])
        container["overrides"] = merged(container["overrides"] or [], overrides)
        fixed = {override.key_or_group: _plain(override.value()) for override in map(parse_override, overrides)}
        narrowed = {key: values for key, values in parameters.items() if isinstance(values, list)}
        searched = {key: entry for key, entry in (container["parameters"] or {}).items() if key not in fixed}
        possible = {key: [value] for key, value in fixed.items()} | narrowed
        container["parameters"] = _possible(searched, possible, fixed) | parameters
        container["points"] = [
            {key: value for key, value in point.items() if key not in fixed} if isinstance(point, dict) else point
            for point in container["points"] or []
        ]
        if seeds is not None:
            container["seeds"] = seeds
        if (container["points"] or "sweep" not in given) and "sweep.sampler.name" not in given:
            finite = not any(isinstance(each, dict) for each in container["parameters"].values())
            container["sampler"]["name"] = "grid" if finite else "tpe"
        config = validate(SweepPage, {"sweep": container}, lambda: compose("sweep", own)).sweep
        if not (config.parameters or config.points) and len(config.seeds) == 1:
            raise UserError("there is nothing to search; give a file (sweep=lr_arch) or several values (lr=1e-4,2e-4)")
        name = config.name or _name_of_file(own) or "+".join(config.parameters) or "seed"
        path = config.path or str(SWEEPS / name)
        storage = config.storage
        if storage is not None and (file := re.fullmatch(r"sqlite:///([^/?][^?]*)(.*)", storage)):
            # Another working directory would make another file.
            storage = f"sqlite:///{Path(file[1]).absolute()}{file[2]}"
        return Sweep(config.model_copy(update={"name": name, "path": path, "storage": storage}))

    # ---- the folder of the sweep ----

    @staticmethod
    @file_errors()
    def open(named: str) -> "Sweep":
        """Open a sweep by its folder, or by its name in checkpoints/sweeps.

        Raises:
            UserError: There is no sweep, or its sweep.yaml is damaged.
        """
        folders = [Path(named), SWEEPS / named]
        file = next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)
        if file is None:
            known = sorted(each.parent.name for each in SWEEPS.glob(f"*/{_FILE}"))
            raise UserError(
                f"there is no sweep at {named}; "
                + (f"{SWEEPS} has {', '.join(known)}" if known else "start one with python sweep.py sweep=...")
            )
        try:
            container = OmegaConf.to_container(OmegaConf.create(read_plain_yaml(file)))
        except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, RecursionError) as error:
            raise UserError(f"{file} can't be read as YAML; start the sweep again to write it") from error
        if not isinstance(container, dict):
            raise UserError(f"{file} holds no sweep; start the sweep again to write it")
        # Keys that were added since have their defaults.
        container = filled_up({str(key): value for key, value in container.items()}, read_config("sweep", [])["sweep"])
        config = validate(SweepPage, {"sweep": container}).sweep
        # The folder may have been moved since.
        return Sweep(config.model_copy(update={"name": config.name or file.parent.name, "path": str(file.parent)}))

    def write(self) -> None:
        """Write sweep.yaml, which status, best, plot and export read."""
        stored = self.config.model_dump(exclude_defaults=True) | {"retry_failed": False}  # it counts for one start
        with writing(self.path / _FILE):
            write_atomically(self.path / _FILE, OmegaConf.to_yaml(OmegaConf.create(stored)))

    @property
    def identity(self) -> Container:
        """What another start of the same sweep must have in common with this one."""
        return {key: value for key, value in self.config.model_dump(mode="json").items() if key in _IDENTITY}

    @property
    def keys(self) -> list[str]:
        """The keys of the runs that the sweep varies, in the order of the file."""
        return [*dict.fromkeys([*self.config.parameters, *(key for point in self.config.points for key in point)])]

    @property
    def num_trials(self) -> int:
        """The number of trials after which the sweep is done. No point runs twice."""
        most = self.config.trials
        if most is None and self.config.sampler.name != "grid":
            most = DEFAULT_TRIALS
        return sum(1 for _ in islice(self.space.grid(), most)) if self.space.is_finite else most or DEFAULT_TRIALS

    # ---- its runs ----

    def run_folder(self, number: int, seed: int) -> Path:
        several = len(self.config.seeds) > 1
        return self.path / (f"trial_{number:04d}_seed_{seed}" if several else f"trial_{number:04d}")

    def overrides(self, point: Point, seed: int) -> list[str]:
        """Return what the command line of a run says about its training."""
        typed = merged(self.config.overrides, overrides_of(point))
        return [*map(_without_needless_quotes, typed), f"seed={seed}"]

    def arguments(self, number: int, point: Point, seed: int) -> list[str]:
        """Return the command line of a run, without the program."""
        folder = self.run_folder(number, seed)
        arguments = [*self.overrides(point, seed), f"checkpoint_path={as_override(str(folder))}"]
        arguments.append(f"run_name={as_override(f'{self.name}_{folder.name}')}")
        if "wandb.group" not in map(key_of, arguments):
            arguments.append(f"wandb.group={as_override(self.name)}")
        return arguments


def _of_runs(typed: list[str]) -> tuple[dict[str, Any], list[Any] | None, list[str]]:
    """Return the parameters, the seeds and the other overrides among the typed keys of runs.

    Raises:
        UserError: One of them can't be read, or sweep.py gives every run its own.
    """
    parameters: dict[str, Any] = {}
    seeds: list[Any] | None = None
    overrides = []
    for each in typed:
        key, override = key_of(each), parse_override(each)
        if key in OWN_KEYS:
            raise UserError(
                f"{key}=...: sweep.py gives every run its own {key}; leave it out (sweep.path is for a folder)"
            )
        if isinstance(override.value(), IntervalSweep):
            parameters[key] = _range_of(override)
            continue
        values = list(_values(override)) if override.is_sweep_override() else None
        if key == "seed":
            seeds = values if values is not None else [override.value()]
        elif values is not None:
            parameters[key] = values
        else:
            overrides.append(each)
    return parameters, seeds, overrides


def differing(identity: Container, stored: Container) -> list[str]:
    """Return the keys in which a sweep differs from a stored one. Needless quotes do not count."""

    def comparable(values: Container) -> Container:
        return values | {"overrides": [*map(_without_needless_quotes, values.get("overrides", []))]}

    return [key for key, value in comparable(identity).items() if comparable(stored).get(key) != value]


def _without_needless_quotes(typed: str) -> str:
    value = parse_override(typed.lstrip("+")).value()
    return f"{typed.partition('=')[0]}={as_override(value)}" if isinstance(value, str) else typed


def _values(override: Override) -> Iterator[Any]:
    value = override.value()
    if not isinstance(value, ChoiceSweep | RangeSweep) or value.shuffle:
        raise UserError(f"{override.input_line!r} is no list of values; write {override.key_or_group}=0,1,2")
    for each in override.sweep_iterator():
        yield _plain(each)


def _plain(value: Any) -> Any:
    """Return a value without Hydra's mark for text in quotes."""
    if isinstance(value, list):
        return [*map(_plain, value)]
    return value.text if isinstance(value, QuotedString) else value


def _range_of(override: Override) -> dict[str, Any]:
    sweep = override.value()
    assert isinstance(sweep, IntervalSweep) and sweep.start is not None and sweep.end is not None
    if isinstance(sweep.start, int) and isinstance(sweep.end, int):  # int(interval(1,4))
        return {"int_range": [sweep.start, sweep.end]}
    kind = "log_range" if "log" in sweep.tags else "range"
    return {kind: [float(sweep.start), float(sweep.end)]}


def merged(overrides: list[str], later: list[str]) -> list[str]:
    """Return the overrides without those whose keys come later again, and then the later ones."""
    keys = {*map(key_of, later)}
    return [*(each for each in overrides if key_of(str(each)) not in keys), *later]


def _possible(parameters: dict[str, Any], possible: dict[str, list[Any]], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters whose conditions can still be met, without conditions on fixed keys.

    Args:
        possible: the values of the keys that were typed.
        fixed: those among the keys that have one value.
    """
    left: dict[str, Any] = {}
    for key, given in parameters.items():
        kept = []
        for entry in given if isinstance(given, list) and isinstance(given[0], dict) else [given]:
            conditions = entry.get("when") if isinstance(entry, dict) else None
            if isinstance(conditions, dict):
                wanted = {parent: value if isinstance(value, list) else [value] for parent, value in conditions.items()}
                met = {
                    parent: [value for value in values if parent not in possible or value in possible[parent]]
                    for parent, values in wanted.items()
                }
                if not all(met.values()):
                    continue
                entry = {**entry, "when": {parent: values for parent, values in met.items() if parent not in fixed}}
            kept.append(entry)
        if kept:
            left[key] = kept if len(kept) > 1 else kept[0]
    return left


def _name_of_file(typed: list[str]) -> str | None:
    for each in typed:
        group, _, value = each.lstrip("+").partition("=")
        if group == "sweep":
            return Path(value.strip("'\"")).stem if names_file(each) else value
    return None
