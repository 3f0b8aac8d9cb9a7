"""The space that a sweep searches: parameters, their values, and when they are there.

A point is a dict {key: value} of the parameters that are there. Whether a parameter is there may
depend on the values of those before it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import Trial

from search.config import Entry, Value
from sharing.recipe import shown_value
from utils.overrides import as_override

Point = dict[str, Value]

# The name in the study of the number of a point in a list of points. No key of a config has spaces.
_POINT = "number of the point"
_MOST_PROBES = 2000


@dataclass(frozen=True, eq=False)
class Parameter:
    """One key of the config, or one group, under one condition."""

    key: str
    # In the study. Optuna allows one distribution for each name, so a key with several conditions
    # has several names.
    name: str
    entry: Entry

    def distribution(self) -> BaseDistribution:
        entry, listed = self.entry, self.entry.listed()
        if entry.int_range is not None:
            return IntDistribution(*entry.int_range, step=entry.step or 1)
        if listed is not None:
            return CategoricalDistribution(listed)
        low, high = entry.log_range or entry.range or (0.0, 0.0)
        return FloatDistribution(low, high, log=entry.log_range is not None)


class Space:
    """The parameters of a sweep, in the order of the file, or its points, one after the other.

    A list of points is one parameter in the study: the number of the point.
    """

    def __init__(self, parameters: dict[str, list[Entry]], points: Sequence[Point] = ()) -> None:
        self._listed = points
        self.parameters: list[Parameter] = []
        if points:
            entry = Entry.model_validate({"values": [*range(len(points))]})
            self.parameters.append(Parameter(_POINT, _POINT, entry))
        for key, entries in parameters.items():
            for entry in entries:
                conditions = (f"{parent}={'|'.join(map(as_override, values))}" for parent, values in entry.when.items())
                name = key if len(entries) == 1 else f"{key} ({', '.join(conditions)})"
                self.parameters.append(Parameter(key, name, entry))
        self._keys = {parameter.name: parameter.key for parameter in self.parameters}

    @property
    def is_finite(self) -> bool:
        return all(parameter.entry.listed() is not None for parameter in self.parameters)

    def suggest(self, trial: Trial) -> Point:
        """Return the point of a trial. The sampler draws what the trial does not have yet."""
        return self.point_of(
            next(self._named(lambda parameter: [trial._suggest(parameter.name, parameter.distribution())]))
        )

    def point_of(self, named: Mapping[str, Value]) -> Point:
        """Return the point of a trial with these parameters in the study."""
        point = {self._keys[name]: value for name, value in named.items() if name in self._keys}
        number = point.get(_POINT)
        return dict(self._listed[number]) if isinstance(number, int) and self._listed else point

    def grid(self) -> Iterator[tuple[dict[str, Value], Point]]:
        """Yield each point of a finite space, as {name in the study: value} and as a point."""
        for named in self._named(lambda parameter: parameter.entry.listed() or []):
            yield named, self.point_of(named)

    def probes(self) -> Iterator[Point]:
        """Yield points in which every value of a list, and both ends of a range, occur."""
        seen: set[tuple[str, str]] = set()
        rng = np.random.default_rng(0)

        def drawn(parameter: Parameter) -> list[Value]:
            entry = parameter.entry
            candidates = entry.listed() or [*(entry.range or entry.log_range or ())]
            return [candidates[rng.integers(len(candidates))]]

        for _ in range(_MOST_PROBES):
            named = next(self._named(drawn))
            new = {(name, repr(value)) for name, value in named.items()}
            if not new <= seen:
                seen |= new
                yield self.point_of(named)

    def _named(
        self, choices: Callable[[Parameter], list[Value]], begun: dict[str, Value] | None = None, at: int = 0
    ) -> Iterator[dict[str, Value]]:
        """Yield every combination of the choices that the conditions allow, as {name: value}."""
        begun = begun or {}
        point = {self._keys[name]: value for name, value in begun.items()}
        for index in range(at, len(self.parameters)):
            parameter = self.parameters[index]
            conditions = parameter.entry.when.items()
            if parameter.key not in point and all(key in point and point[key] in wanted for key, wanted in conditions):
                for value in choices(parameter):
                    yield from self._named(choices, begun | {parameter.name: value}, index + 1)
                return
        yield begun


def overrides_of(point: Point) -> list[str]:
    """Return a point as it is typed on a command line."""
    return [f"{key}={as_override(value)}" for key, value in point.items()]


def shown_point(point: Point) -> str:
    """Return a point for a person, with numbers of four digits."""
    return " ".join(f"{key}={shown_value(value)}" for key, value in point.items())
