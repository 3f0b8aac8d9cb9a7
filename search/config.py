"""The config of a sweep: config/sweep.yaml says what each key means."""

import re
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from records.folder import require_folder_name
from utils.config import Bool, Float, Int, StrictModel
from utils.mistakes import unknown_key
from utils.overrides import as_override

# Here, because --help needs no optuna.
USAGE = """
sweep.py: run many trainings, and find the best.

  python sweep.py sweep=lr_arch                              config/sweep/lr_arch.yaml
  python sweep.py sweep=path/to/my_sweep.yaml max_steps=500  a file of yours; max_steps is the same for all
  python sweep.py lr=1e-4,2e-4 arch=hrm,trm seed=0,1,2       without a file: all combinations
  python sweep.py --dry-run sweep=lr_arch                    print the command lines and the time, don't run

The same command goes on after a stop. Typed in a second terminal, it joins.

  python sweep.py again lr_arch --best 5 seed=0,1,2          its best points again, with other seeds, data or steps
  python sweep.py status lr_arch       a table of its trials           (a name in checkpoints/sweeps, or a folder)
  python sweep.py best lr_arch         the command line of the best
  python sweep.py plot lr_arch         plots.html and pictures         (-o names a folder for them)
  python sweep.py export lr_arch       the best as config/experiment/lr_arch_best.yaml       (-o names another file)

Keys of the sweep begin with sweep. and stand below. All other keys are those of pretrain.py.
"""

Value: TypeAlias = bool | int | float | str | None

# Keys of a run that sweep.py sets itself.
OWN_KEYS = ("checkpoint_path", "resume", "run_name")


def key_of(override: str) -> str:
    """Return the key of an override as it is typed."""
    return override.lstrip("+").partition("=")[0]


def _as_entries(given: Any) -> Any:
    """Return a list of entries. In YAML it may also be one entry, or a list of values."""
    if isinstance(given, dict):
        return [given]
    if isinstance(given, list) and given and not all(isinstance(entry, dict) for entry in given):
        return [{"values": given}]
    return given


class Entry(StrictModel):
    """The values that a parameter may take, and the condition under which it takes them."""

    values: list[Value] | None = Field(None, min_length=1)
    range: tuple[Float, Float] | None = None
    log_range: tuple[Float, Float] | None = None
    int_range: tuple[Int, Int] | None = None
    num: Int | None = Field(None, ge=2)  # of range and log_range
    step: Int | None = Field(None, ge=1)  # of int_range
    when: dict[str, list[Value]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _in_one_form(cls, given: dict[str, Any]) -> Any:
        """Write lists among the values as overrides, and one value of `when` as a list."""
        if unknown := [str(key) for key in given if key not in cls.model_fields]:
            raise ValueError(unknown_key(unknown[0], cls))
        values, when = given.get("values"), given.get("when")
        if isinstance(values, list):
            values = [as_override(value) if isinstance(value, list | dict) else value for value in values]
            given = given | {"values": values}
        if isinstance(when, dict):
            when = {key: value if isinstance(value, list) else [value] for key, value in when.items()}
            given = given | {"when": when}
        return given

    @model_validator(mode="after")
    def _has_one_kind(self) -> "Entry":
        kinds = {name: getattr(self, name) for name in ("values", "range", "log_range", "int_range")}
        given = {name: value for name, value in kinds.items() if value is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"give one of values, range, log_range and int_range, not {found}")
        ((kind, value),) = given.items()
        if kind == "values" and len({*map(repr, value)}) < len(value):
            raise ValueError(f"values is {value}; name each value once")
        if (kind != "values" and not value[0] < value[1]) or (kind == "log_range" and value[0] <= 0):
            raise ValueError(f"{kind} is {[*value]}; give a lower and a higher number, above 0 for log_range")
        suits = {"range": "num", "log_range": "num", "int_range": "step"}.get(kind)
        for option in ("num", "step"):
            if getattr(self, option) is not None and option != suits:
                raise ValueError(f"{option} is not for {kind}; leave it out")
        return self

    def listed(self) -> list[Value] | None:
        """Return the values if there are finitely many of them, else None."""
        if self.values is not None:
            return self.values
        if self.int_range is not None:
            return [*range(self.int_range[0], self.int_range[1] + 1, self.step or 1)]
        if self.num is None:
            return None
        low, high = self.range or self.log_range or (0.0, 0.0)
        parts = [index / (self.num - 1) for index in range(self.num)]
        if self.range is not None:
            return [low + (high - low) * part for part in parts]
        return [float(f"{low * (high / low) ** part:.12g}") for part in parts]


# The samplers and pruners that use an option.
_USERS = {
    "startup_trials": ("tpe", "median"),
    "warmup_steps": ("median", "successive_halving"),
    "reduction_factor": ("successive_halving",),
}


class _WithOptions(StrictModel):
    """Options are given only with the names that use them."""

    name: str

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        for option, names in _USERS.items():
            if getattr(self, option, None) is not None and self.name not in names:
                raise ValueError(f"{option} is for {' and '.join(names)}, not for {self.name}; leave it out")
        return self


class SamplerConfig(_WithOptions):
    name: Literal["grid", "random", "tpe"]
    seed: Int = Field(ge=0, lt=2**31)
    startup_trials: Int | None = Field(ge=1)


class PrunerConfig(_WithOptions):
    name: Literal["none", "median", "successive_halving"]
    warmup_steps: Int | None = Field(ge=0)
    startup_trials: Int | None = Field(ge=0)
    reduction_factor: Int | None = Field(ge=2)

    @model_validator(mode="after")
    def _first_rung_is_a_step(self) -> Self:
        if self.name == "successive_halving" and self.warmup_steps == 0:
            raise ValueError("warmup_steps is 0, but the first rung of successive_halving is at step 1 or later")
        return self


# Options of sbatch that follow from other keys of the launcher, or that it needs for itself.
_TAKEN_OPTIONS = {
    *("ntasks", "ntasks-per-node", "n", "cpus-per-task", "c", "array", "output", "error", "open-mode", "job-name"),
    *("signal", "chdir", "wrap"),
}


class LauncherConfig(StrictModel):
    name: Literal["local", "torchrun", "slurm"]
    at_once: Int | None = Field(ge=1)
    threads: Int = Field(ge=1)
    ranks: Int = Field(ge=1)
    gpus: list[Int]
    slurm: dict[str, str | Int | Bool] | None

    @model_validator(mode="after")
    def _options_fit(self) -> "LauncherConfig":
        options, nodes = self.slurm or {}, (self.slurm or {}).get("nodes", 1)
        taken = [option for option in options if option.replace("_", "-") in _TAKEN_OPTIONS]
        divides = type(nodes) is int and nodes > 0 and self.ranks % nodes == 0
        if self.name == "slurm" and (type(options.get("time")) is not int or taken or not divides):
            raise ValueError(
                f"slurm is {options}; give time, the limit of a job in minutes, and options of sbatch that do not "
                f"follow from launcher.ranks and launcher.threads; nodes divide launcher.ranks ({self.ranks})"
            )
        if self.gpus if self.name == "slurm" else options:
            raise ValueError(f"gpus is for this machine, and slurm for jobs of Slurm; leave out one (name={self.name})")
        if self.name == "local" and self.ranks > 1:
            raise ValueError(f"ranks is {self.ranks}, but the launcher local starts one process; give name=torchrun")
        if self.gpus and (self.at_once or 1) * self.ranks > len(self.gpus):
            raise ValueError(
                f"gpus has {len(self.gpus)} devices, too few for {self.at_once or 1} runs of {self.ranks} ranks at "
                "once; lower at_once or ranks"
            )
        return self


class SweepConfig(StrictModel):
    name: Annotated[str, AfterValidator(partial(require_folder_name, key_of_path="sweep.path"))] | None
    path: str | None
    storage: str | None
    overrides: list[str]
    parameters: dict[str, Annotated[list[Entry], BeforeValidator(_as_entries), Field(min_length=1)]]
    points: list[dict[str, Value]]
    seeds: list[Annotated[Int, Field(ge=0)]] = Field(min_length=1)
    metric: str = Field(min_length=1)
    direction: Literal["maximize", "minimize"]
    trials: Int | None = Field(ge=1)
    hours: Float | None = Field(gt=0)
    steps: Int | None = Field(ge=1)
    retry_failed: Bool
    sampler: SamplerConfig
    pruner: PrunerConfig
    launcher: LauncherConfig

    @field_validator("storage")
    @classmethod
    def _no_password_is_typed(cls, storage: str | None) -> str | None:
        if storage is not None and storage != without_password(storage):
            raise ValueError(
                f"{without_password(storage)} has a password, which the list of processes and files would show; leave "
                "it out, and put it where the database's client reads it, such as ~/.pgpass or ~/.my.cnf"
            )
        return storage

    @model_validator(mode="after")
    def _keys_are_free(self) -> "SweepConfig":
        if len({*self.seeds}) < len(self.seeds):
            raise ValueError(f"seeds are {self.seeds}; give each once")
        fixed = [*map(key_of, self.overrides)]
        for key in (*fixed, *self.parameters):
            reasons = dict.fromkeys(OWN_KEYS, f"sweep.py gives every run its own {key}")
            reasons |= {"seed": "give sweep.seeds instead", "on_event": "a sweep stores what it is given"}
            if reason := reasons.get(key):
                raise ValueError(f"{key} stands in overrides or parameters; leave it out: {reason}")
            if key in fixed and key in self.parameters:
                raise ValueError(f"parameters.{key} is searched, and overrides set it too; leave it out of one of them")
        return self

    @model_validator(mode="after")
    def _conditions_refer_to_parameters_above(self) -> "SweepConfig":
        above: dict[str, list[Value]] = {}
        for key, entries in self.parameters.items():
            if len(entries) > 1 and not all(entry.when for entry in entries):
                raise ValueError(f"parameters.{key} has several entries; each needs a `when` of its own")
            for parent, wanted in (condition for entry in entries for condition in entry.when.items()):
                if parent not in above:
                    names = ", ".join(above) or "none"
                    raise ValueError(
                        f"parameters.{key}: `when` names {parent!r}, which is no parameter above it; above are {names}"
                    )
                if unknown := [value for value in wanted if value not in above[parent]]:
                    known = ", ".join(map(str, above[parent])) or "infinitely many values"
                    raise ValueError(f"parameters.{key}: {parent} is never {unknown[0]!r}; it is one of {known}")
            above[key] = [value for entry in entries for value in entry.listed() or []]
        return self

    @model_validator(mode="after")
    def _the_sampler_fits(self) -> "SweepConfig":
        if self.points and (self.parameters or self.sampler.name != "grid"):
            raise ValueError(f"points need sweep.sampler.name=grid, not {self.sampler.name}, and no parameters")
        for key, entries in self.parameters.items():
            if self.sampler.name == "grid" and any(entry.listed() is None for entry in entries):
                raise ValueError(f"parameters.{key} has infinitely many values; give num, how many of them to try")
        return self


def without_password(url: str) -> str:
    """Return the URL of a database for a message."""
    url = re.sub(r"(://[^:/@]*:).*@", r"\1***@", url)
    return re.sub(r"((?:password|passwd|pwd)=)[^&]*", r"\1***", url, flags=re.IGNORECASE)
