"""Write a checkpoint with the names and the file format that the published HRM and TRM code reads.

    python -m models.export --format hrm checkpoints/<project>/<run> -o FILE

The tensors are written bit for bit as they are. If the name of FILE ends in .safetensors, FILE has
that format; otherwise `torch.save` writes a plain dict.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from models.published import Weights, to_ours, to_published
from utils.arguments import Parser
from utils.checkpoint.reader import open_checkpoint
from utils.errors import UserError
from utils.files import file_errors
from utils.shell import run_command
from utils.weights_file import read_weights, write_weights

# The options of the published code. Names of tensors don't show the MLP's kind or the positions. A
# multiple other than 256 gives shapes that the published code never builds.
_PUBLISHED_OPTIONS = {
    "name": ("hrm", "trm"),
    "mlp": ("swiglu",),
    "width_multiple": (256,),
    "pos_encodings": ("rope", "learned", "none"),
}


@dataclass(frozen=True)
class Settings:
    """The values of the command line."""

    format: str
    checkpoint: str
    output: Path
    compiled: bool
    raw: bool


def parse_settings(argv: list[str] | None) -> Settings:
    """Read the command line.

    Raises:
        UserError: An option is unknown, malformed or missing.
    """
    parser = Parser(
        "python -m models.export", "Write a checkpoint with the names that the published HRM and TRM code reads."
    )
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="a run folder, a step folder, or a weights file")
    add("--format", required=True, choices=["hrm"], help="names to write: hrm, which HRM and TRM code both read")
    add(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="safetensors if it ends so, else torch.save",
    )
    add("--compiled", action="store_true", help="write a compiled model's names, which begin with _orig_mod.")
    add("--raw", action="store_true", help="write the trained weights instead of their moving average")
    return Settings(**vars(parser.parse_args(argv)))


def load_weights(checkpoint: str, *, raw: bool) -> Weights:
    """Return the weights of a checkpoint by our names.

    Args:
        checkpoint: a run folder, a step folder or a weights file.
        raw: return the trained weights. Otherwise the moving average is returned if there is one.

    Raises:
        UserError: The checkpoint can't be read, or the published code has no such architecture.
    """
    path = Path(checkpoint)
    with file_errors():
        is_run = path.is_dir()
    if not is_run:
        if raw:
            raise UserError(f"--raw applies to the checkpoint of a run, but {checkpoint} is not one; leave it out")
        return to_ours(read_weights(checkpoint))
    opened = open_checkpoint(path, lambda warning: print(f"warning: {warning}", file=sys.stderr))
    arch = opened.state.config.get("arch", {})
    for option, published in _PUBLISHED_OPTIONS.items():
        if arch.get(option, published[0]) not in published:
            raise UserError(
                f"{opened.path} has arch.{option}={arch[option]}, which the published code doesn't know; "
                f"only {' or '.join(map(str, published))} can be exported"
            )
    return opened.weights() if raw else opened.trained_weights()


def export(settings: Settings) -> str:
    """Write the file and return a line about it.

    Raises:
        UserError: The checkpoint can't be exported or the file can't be written. An earlier file
            of the same name stays as it was.
    """
    weights = load_weights(settings.checkpoint, raw=settings.raw)
    published = to_published(weights, compiled=settings.compiled)
    try:
        write_weights(settings.output, published)
    except OSError as error:
        raise UserError(
            f"can't write {settings.output} ({error.strerror}); check the folder and its free space, or change -o"
        ) from error
    return f"wrote {settings.output}: {len(published)} tensors, {sum(t.numel() for t in published.values()):,} numbers"


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, 2 after a mistake of the user, 130 after Ctrl-C."""
    return run_command(lambda arguments: export(parse_settings(arguments)), argv)


if __name__ == "__main__":
    sys.exit(main())
