"""Write a checkpoint as the published HRM and TRM code reads it: its names, its kind of file.

    python -m models.export --format hrm checkpoints/<project>/<run> -o FILE

The tensors are written as they are, bit for bit. FILE is safetensors where its name ends so, else what `torch.save`
makes of a plain dict.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from models.published import Weights, to_ours, to_published
from utils.arguments import Parser
from utils.errors import UserError
from utils.run.resume import open_checkpoint
from utils.shell import run_command
from utils.weights_file import read_weights, write_weights

# What the published code can be told. No name of a tensor shows the activation or the positions.
_PUBLISHED_OPTIONS = {"name": ("hrm", "trm"), "mlp": ("swiglu",), "pos_encodings": ("rope", "learned", "none")}


@dataclass(frozen=True)
class Settings:
    """What the command line said."""

    format: str
    checkpoint: str
    output: Path
    compiled: bool
    raw: bool


def parse_settings(argv: list[str] | None) -> Settings:
    """Raises UserError for unknown, malformed or missing options."""
    parser = Parser("python -m models.export", "Write a checkpoint under the names that the published code knows.")
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT", help="the folder of a run or of one of its steps, or a file of weights")
    add("--format", required=True, choices=["hrm"], help="whose names: hrm are those of the HRM code, and of TRM's")
    add("-o", "--output", required=True, type=Path, metavar="FILE", help="safetensors if it ends so, else torch.save")
    add("--compiled", action="store_true", help="names as a compiled model has them, with _orig_mod. in front")
    add("--raw", action="store_true", help="the weights as trained, where a run keeps their moving average too")
    return Settings(**vars(parser.parse_args(argv)))


def load_weights(checkpoint: str, *, raw: bool) -> Weights:
    """By our names: those that were evaluated, which is the moving average where there is one and `raw` is not set.

    Raises UserError for what can't be read, and for a run whose architecture the published code doesn't have.
    """
    path = Path(checkpoint)
    if not path.is_dir():
        if raw:
            raise UserError(f"--raw chooses within the checkpoint of a run, but {checkpoint} is none; leave it out")
        return to_ours(read_weights(checkpoint))
    opened = open_checkpoint(path, lambda warning: print(f"warning: {warning}", file=sys.stderr))
    arch = opened.state.config.get("arch", {})
    for option, published in _PUBLISHED_OPTIONS.items():
        if arch.get(option, published[0]) not in published:
            raise UserError(
                f"{opened.path} has arch.{option}={arch[option]}, which the published code doesn't know; "
                f"only {' or '.join(published)} can be exported"
            )
    return opened.weights() if raw else opened.trained_weights()


def export(settings: Settings) -> str:
    """Write the file and return a line about it. Raises UserError and leaves an earlier file as it was."""
    weights = load_weights(settings.checkpoint, raw=settings.raw)
    published = to_published(weights, compiled=settings.compiled)
    try:
        write_weights(settings.output, published)
    except OSError as error:
        raise UserError(
            f"can't write {settings.output} ({error.strerror}); see to the folder and the space in it, or give "
            "another -o"
        ) from error
    return f"wrote {settings.output}: {len(published)} tensors, {sum(t.numel() for t in published.values()):,} numbers"


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, 2 after a mistake of the user, 130 after Ctrl-C."""
    return run_command(lambda arguments: export(parse_settings(arguments)), argv)


if __name__ == "__main__":
    sys.exit(main())
