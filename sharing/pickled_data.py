"""Read the plain data in a pickle without making an object, or calling a function, that it names.

Python's own reader calls whatever a file names. This one looks at the instructions alone: what the
file would call is kept as a name with its arguments.
"""

import pickletools
from collections.abc import Callable
from typing import Any

_MARK = object()


class Named:
    """Something that a pickle names and nothing looks up, such as torch.Size."""

    def __init__(self, name: str) -> None:
        self.name = name


class Made:
    """What a pickle would make: the call of a name with arguments, and a state."""

    def __init__(self, maker: Named, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = maker.name, arguments
        self.state: Any = None


def plain_data(pickled: bytes) -> Any:
    """Return the data: None, numbers, texts, containers, and `Named` and `Made` for all else.

    Raises:
        ValueError: The bytes are no pickle, or use an instruction that such data never need.
    """
    machine = _Machine()
    try:
        for instruction, argument, _ in pickletools.genops(pickled):
            if instruction.name == "STOP":
                return machine.pop()
            machine.run(instruction.name, argument)
    except (LookupError, TypeError, AttributeError) as error:  # from instructions that make no sense
        raise ValueError(f"no whole pickle ({type(error).__name__})") from error
    raise ValueError("no whole pickle")


class _Machine:
    """The stack and the memory that the instructions of a pickle work on."""

    def __init__(self) -> None:
        self._stack = list[Any]()
        self._memory = dict[int, Any]()

    def pop(self) -> Any:
        return self._stack.pop()

    def run(self, name: str, argument: Any) -> None:
        """Carry out one instruction.

        Raises:
            ValueError: The instruction is not one of those below.
        """
        if name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            self._stack.append(argument)
        elif name in _TUPLES:
            self._stack.append(tuple(reversed([self.pop() for _ in range(_TUPLES[name])])))
        elif name in _CONTAINERS:
            self._stack.append(_CONTAINERS[name](self._pop_to_mark()))
        elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
            self._memory[len(self._memory) if argument is None else argument] = self._stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memory[argument])
        elif name in ("STACK_GLOBAL", "GLOBAL"):
            if name == "STACK_GLOBAL":
                member, module = self.pop(), self.pop()
                argument = f"{module} {member}"
            self._stack.append(Named(argument.replace(" ", ".")))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, maker = self.pop(), self.pop()
            if not isinstance(maker, Named) or not isinstance(arguments, tuple):
                raise ValueError("calls something without a name")
            self._stack.append(Made(maker, arguments))
        elif name in ("APPEND", "SETITEM", "APPENDS", "SETITEMS", "ADDITEMS", "BUILD"):
            self._fill(name)
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"uses the instruction {name}")

    def _fill(self, name: str) -> None:
        """Put what lies on top of the stack into the container, or the object, below it."""
        match name:
            case "BUILD":
                state = self.pop()
                if not isinstance(self._stack[-1], Made):
                    raise ValueError("gives a state to something that is not made")
                self._stack[-1].state = state
            case "APPEND" | "APPENDS":
                items = self._pop_to_mark() if name == "APPENDS" else [self.pop()]
                _of_type(self._stack[-1], list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self._pop_to_mark() if name == "SETITEMS" else [self.pop(), self.pop()][::-1]
                _of_type(self._stack[-1], dict).update(_dict(items))
            case _:
                _of_type(self._stack[-1], set).update(map(_key, self._pop_to_mark()))

    def _pop_to_mark(self) -> list[Any]:
        items = list[Any]()
        while (item := self.pop()) is not _MARK:
            items.append(item)
        return items[::-1]


def _of_type(container: Any, kind: type) -> Any:
    """Return the container. Raise ValueError if it is none of this type."""
    if type(container) is not kind:
        raise ValueError(f"fills no {kind.__name__}")
    return container


def _dict(items: list[Any]) -> dict[Any, Any]:
    return {_key(key): value for key, value in zip(items[::2], items[1::2], strict=True)}


def _key(key: Any) -> Any:
    """Return a key of a dict. Raise ValueError for a tuple, whose hash may never end."""
    if not isinstance(key, str | bytes | int | float | Named | Made | None):
        raise ValueError(f"has a key of the type {type(key).__name__}")
    return key


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"TUPLE": tuple, "LIST": list, "DICT": _dict}
