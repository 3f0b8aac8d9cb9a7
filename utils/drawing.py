"""Draw pictures with matplotlib, an optional package."""

from io import BytesIO
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import refuse_links, write_atomically
from utils.text import one_line

BLACK, BLUE, RED, GREY = "#1d2127", "#1f6feb", "#c2410c", "#8a8f98"
_DPI = 130


def pyplot() -> Any:
    """Import matplotlib, with the backend that draws into files and needs no screen."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("drawing needs matplotlib; pip install -r requirements-demo.txt") from error

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Save and close a figure."""
    refuse_links([path])
    picture = BytesIO()
    try:
        figure.savefig(picture, dpi=_DPI)
        write_atomically(path, picture.getbuffer())
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(f"{path} can't be written ({reason}); check this path and its permissions") from error
    finally:
        pyplot().close(figure)
