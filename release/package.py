"""Train hierarchical reasoning models, and solve puzzles with them.

from hrm_trainer import Solver
"""

from typing import TYPE_CHECKING, Any

from utils.programs import VERSION as __version__

if TYPE_CHECKING:
    from solve import Solver

__all__ = ["Solver", "__version__"]


def __getattr__(name: str) -> Any:
    """Import Solver when it is first asked for, because its import takes seconds."""
    if name != "Solver":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from solve import Solver

    return Solver
