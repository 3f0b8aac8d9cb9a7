"""What a sweep is: its config, with what was typed, and the command line of each of its runs."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, QuotedString, RangeSweep
from omegaconf import OmegaConf

from records.folder import CHECKPOINTS
from search.config import OWN_KEYS, SweepConfig, key_of
from search.space import Point, Space, overrides_of
from utils.command_line import filled_up, read_config, validate
from utils.composing import compose
from utils.config import Container, StrictModel, page
from utils.config_files import names_file
from utils.errors import UserError
from utils.files import file_errors, read_yaml, write_atomically, writing
from utils.overrides import as_override, parse_override

SWEEPS = CHECKPOINTS / "sweeps"
DEFAULT_TRIALS = 50
_FILE = "sweep.yaml"
# These make a study what it is. The other keys may change from one start to the next.
_IDENTITY = {"overrides", "parameters", "points", "seeds", "metric", "direction"}


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
    """A sweep, and where it lives. The name and the path in its config are not null."""

    def __init__(self, config: SweepConfig) -> None:
        assert config.name is not None and config.path is not None
        self.config, self.name, self.path = config, config.name, Path(config.path)
        self.space = Space(config.parameters, config.points)
        self.sign = 1 if config.direction == "maximize" else -1

    @staticmethod
    def read(typed: list[str], again: Container | None = None) -> "Sweep":
        """Read a sweep from what was typed: sweep=..., keys of the sweep, and keys of its runs.

        A key of the runs with several values (lr=1e-4,2e-4) becomes a parameter. With one value it
        is the same for all trials, also if the file searches it.

        Args:
            again: values for keys of the sweep in place of the defaults.
        """
        typed = [each.lstrip("+") for each in typed]
        own = [each for each in typed if re.match(r"sweep[.=]", each)]
        if parameter := next((each for each in own if re.match(r"sweep\.parameters\b", each)), None):
            raise UserError(f"{parameter!r}: type the key itself with several values (lr=1e-4,2e-4), or write a file")
        given = {*map(key_of, own)}
        values: Container = read_config("sweep", own)["sweep"]
        values |= {key: value for key, value in (again or {}).items() if f"sweep.{key}" not in given}
        searched, fixed, overrides = dict[str, Any](), dict[str, Any](), list[str]()
        for each in typed:
            if each in own:
                continue
            key, override = key_of(each), parse_override(each.lstrip("+"))
            if key in OWN_KEYS:
                raise UserError(f"{key}=...: sweep.py gives every run its own {key} (in sweep.path); leave it out")
            if override.is_sweep_override():
                searched[key] = _searched(override)
            elif key == "seed":
                searched[key] = [_plain(override.value())]
            else:
                fixed[key] = [_plain(override.value())]
                overrides.append(each)
        values["seeds"] = searched.pop("seed", values["seeds"])
        values["overrides"] = merged(values["overrides"] or [], overrides)
        possible = fixed | {key: listed for key, listed in searched.items() if isinstance(listed, list)}
        values["parameters"] = _possible(values["parameters"] or {}, possible, fixed) | searched
        values["points"] = [
            {key: value for key, value in point.items() if key not in fixed} if isinstance(point, dict) else point
            for point in values["points"] or []
        ]
        if (values["points"] or "sweep" not in given) and "sweep.sampler.name" not in given:
            has_range = any(isinstance(each, dict) for each in values["parameters"].values())
            values["sampler"]["name"] = "tpe" if has_range else "grid"
        config = validate(SweepPage, {"sweep": values}, lambda: compose("sweep", own)).sweep
        if not (config.parameters or config.points) and len(config.seeds) == 1:
            raise UserError("there is nothing to search; give a file (sweep=lr_arch) or several values (lr=1e-4,2e-4)")
        file = next((each.partition("=")[2] for each in own if key_of(each) == "sweep"), None)
        if file is not None and names_file(f"sweep={file}"):
            file = Path(file.strip("'\"")).stem
        name, storage = config.name or file or "+".join(config.parameters) or "seed", config.storage
        if storage is not None and (relative := re.fullmatch(r"sqlite:///([^/?][^?]*)(.*)", storage)):
            # Another working directory would make another file.
            storage = f"sqlite:///{Path(relative[1]).absolute()}{relative[2]}"
        path = config.path or str(SWEEPS / name)
        return Sweep(config.model_copy(update={"name": name, "path": path, "storage": storage}))

    # ---- the folder of the sweep ----

    @staticmethod
    @file_errors()
    def open(named: str) -> "Sweep":
        """Open a sweep by its folder, or by its name in checkpoints/sweeps."""
        file = next((each / _FILE for each in (Path(named), SWEEPS / named) if (each / _FILE).is_file()), None)
        if file is None:
            known = ", ".join(sorted(each.parent.name for each in SWEEPS.glob(f"*/{_FILE}"))) or "none"
            raise UserError(
                f"there is no sweep at {named}, and {SWEEPS} has {known}; start one with python sweep.py sweep=..."
            )
        # Keys that were added since have their defaults.
        stored = filled_up(read_yaml(file, "start the sweep again to write it"), read_config("sweep", [])["sweep"])
        config = validate(SweepPage, {"sweep": stored}).sweep
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
        return self.config.model_dump(mode="json", include=_IDENTITY)

    @property
    def keys(self) -> list[str]:
        """The keys of the runs that the sweep varies, in the order of the file."""
        return [*dict.fromkeys([*self.config.parameters, *(key for point in self.config.points for key in point)])]

    @property
    def num_trials(self) -> int:
        """The number of trials after which the sweep is done. No point runs twice."""
        most = self.config.trials or (None if self.config.sampler.name == "grid" else DEFAULT_TRIALS)
        return sum(1 for _ in islice(self.space.grid(), most)) if self.space.is_finite else most or DEFAULT_TRIALS

    # ---- its runs ----

    def run_folder(self, number: int, seed: int) -> Path:
        several = len(self.config.seeds) > 1
        return self.path / (f"trial_{number:04d}_seed_{seed}" if several else f"trial_{number:04d}")

    def overrides(self, point: Point, seed: int) -> list[str]:
        """Return what the command line of a run says about its training."""
        return [*_plainly(merged(self.config.overrides, overrides_of(point))), f"seed={seed}"]

    def arguments(self, number: int, point: Point, seed: int) -> list[str]:
        """Return the command line of a run, without the program."""
        folder = self.run_folder(number, seed)
        arguments = [*self.overrides(point, seed), f"checkpoint_path={as_override(str(folder))}"]
        arguments.append(f"run_name={as_override(f'{self.name}_{folder.name}')}")
        if "wandb.group" not in map(key_of, arguments):
            arguments.append(f"wandb.group={as_override(self.name)}")
        return arguments


def merged(overrides: list[str], later: list[str]) -> list[str]:
    """Return the overrides without those whose keys come later again, and then the later ones."""
    keys = {*map(key_of, later)}
    return [*(each for each in overrides if key_of(str(each)) not in keys), *later]


def differing(identity: Container, stored: Container) -> list[str]:
    """Return the keys in which a sweep differs from a stored one. Needless quotes do not count."""
    mine, theirs = ({**each, "overrides": [*_plainly(each.get("overrides", []))]} for each in (identity, stored))
    return [key for key, value in mine.items() if theirs.get(key) != value]


def _plainly(overrides: Iterable[str]) -> Iterable[str]:
    """Yield overrides without needless quotes."""
    for typed in overrides:
        value = parse_override(typed.lstrip("+")).value()
        yield f"{typed.partition('=')[0]}={as_override(value)}" if isinstance(value, str) else typed


def _searched(override: Override) -> Any:
    """Return the values of an override as YAML has them: a list, or one entry with a range."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        if isinstance(value.start, int) and isinstance(value.end, int):  # int(interval(1,4))
            return {"int_range": [value.start, value.end]}
        assert value.start is not None and value.end is not None
        return {"log_range" if "log" in value.tags else "range": [float(value.start), float(value.end)]}
    if not isinstance(value, ChoiceSweep | RangeSweep) or value.shuffle:
        raise UserError(f"{override.input_line!r} is no list of values; write {override.key_or_group}=0,1,2")
    return [*map(_plain, override.sweep_iterator())]


def _plain(value: Any) -> Any:
    """Return a value without Hydra's mark for text in quotes."""
    if isinstance(value, list):
        return [*map(_plain, value)]
    return value.text if isinstance(value, QuotedString) else value


def _possible(parameters: dict[str, Any], possible: dict[str, list[Any]], fixed: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters whose conditions can still be met, without conditions on fixed keys.

    Args:
        possible: the values of the keys that were typed.
        fixed: those keys that have one value, and so are no parameters.
    """
    left: dict[str, Any] = {}
    for key, given in parameters.items():
        kept = []
        for entry in given if isinstance(given, list) and isinstance(given[0], dict) else [given]:
            conditions = entry.get("when") if isinstance(entry, dict) else None
            if isinstance(conditions, dict):
                listed = {key: value if isinstance(value, list) else [value] for key, value in conditions.items()}
                met = {
                    parent: [value for value in wanted if parent not in possible or value in possible[parent]]
                    for parent, wanted in listed.items()
                }
                if not all(met.values()):
                    continue
                entry = {**entry, "when": {parent: values for parent, values in met.items() if parent not in fixed}}
            kept.append(entry)
        if kept and key not in fixed:
            left[key] = kept if len(kept) > 1 else kept[0]
    return left
