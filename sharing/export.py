"""Write a checkpoint as a file of weights, or as a folder to share, also on the Hugging Face Hub.

    python -m sharing.export checkpoints/<project>/<run> -o FILE.safetensors
    python -m sharing.export checkpoints/<project>/<run> -o FOLDER
    python -m sharing.export checkpoints/<project>/<run> --push owner/repo [--private]
    python -m sharing.export --format hrm checkpoints/<project>/<run> -o FILE
    python -m sharing.export --format urm checkpoints/<project>/<run> -o FILE.pt
    python -m sharing.export --format transformers checkpoints/<project>/<run> -o FOLDER
    python -m sharing.export --format onnx checkpoints/<project>/<run> -o FOLDER [--weights int8]

The first file describes its model, so that every command loads it without further keys. The folder
has this file as model.safetensors, a recipe and a card. The others are read by the published code.
The tensors are written bit for bit, except that URM's program needs the parameters of its
convolution in forward_dtype. onnx, aoti, torchscript, mlx and web hold one segment of the model,
for hosts without this project (sharing/segment/).
"""

import math
import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from models import ArchConfig
from models.base import CommonConfig
from models.text.config import TextConfig
from models.tokens import TokenConfig
from sharing.card import recipe_and_card
from sharing.exported import ExportedText, Source, open_source
from sharing.published import Weights, arch_of, to_published
from sharing.published_text import write_for_transformers
from sharing.recipe import typed_options
from sharing.segment.function import WeightDtype
from sharing.sources import step_around
from sharing.weights_file import open_weights, write_weights
from utils.arguments import Parser, typed_path
from utils.command_line import read_config
from utils.config import flatten
from utils.errors import UserError
from utils.files import INCOMPLETE
from utils.hub import require_account, upload
from utils.overrides import as_override, typed_override
from utils.safetensors_files import FILE
from utils.shell import run_command
from utils.text import for_shell

# The published programs: how a person chooses a model there, and the values of our options that
# they compute. Their classes ignore options that they lack, but their losses take loss_type alone.
_SWIGLU = {"mlp": ("swiglu",), "conv_2d": (False,)}
_CHOSEN = {"hrm": "arch=hrm_v1", "trm": "arch=trm", "se_rrm": "arch=trm_equi", "urm": "arch=urm"}
_COMPUTED: dict[str, dict[str, tuple[Any, ...]]] = {
    "hrm": _SWIGLU | {"pos_encodings": ("rope", "learned")},
    "trm": _SWIGLU | {"pos_encodings": ("rope", "learned", "none")},
    "se_rrm": {},
    "urm": {
        **{"mlp": ("conv_swiglu",), "pos_encodings": ("rope",), "mlp_t": (False,), "conv_2d": (False,)},
        "num_registers": (0,),
    },
}
# Not from sharing/segment/formats.py, whose imports take long.
SEGMENT_FORMATS = ("onnx", "aoti", "torchscript", "mlx", "web")
# Options of URM whose defaults differ there, and their names.
_OF_URM = {"halt_max_steps": "loops", "H_cycles": "H_cycles", "L_cycles": "L_cycles", "num_layers": "num_layers"}


def parse_settings(argv: list[str] | None) -> Namespace:
    """Read the command line, or raise UserError."""
    parser = Parser(
        "python -m sharing.export",
        "Write a checkpoint as a file of weights, or as a folder with a card, also on the Hugging Face Hub.",
        path_keys=("checkpoint", "run"),
    )
    add = parser.add_argument
    add("checkpoint", type=os.path.expanduser, metavar="CHECKPOINT", help="a run or step folder, or a weights file")
    add(
        "--format",
        default="native",
        choices=["native", "hrm", "urm", "transformers", *SEGMENT_FORMATS],
        help="native (the default): safetensors that describe their model, for every command of this project, alone "
        "or in a folder with a recipe and a card; hrm: the names that the published code of HRM, TRM and SE-RRM "
        "reads; urm: a checkpoint that URM code reads; transformers: a folder for that library, of arch=hrm_text "
        "alone; onnx, aoti, torchscript, mlx: a folder with one segment of the model for other programs; web: an HTML "
        "page that solves (docs/solving.md)",
    )
    help_of_output = "native: NAME.safetensors, or a new folder; hrm, urm: a file; web: NAME.html; others: a new folder"
    add("-o", "--output", type=typed_path, metavar="PATH", help=help_of_output)
    add("--push", metavar="OWNER/REPO", help="native: upload the folder to the Hugging Face Hub")
    add("--private", action="store_true", help="with --push: a repository that is made is private")
    add("--compiled", action="store_true", help="hrm, urm: write a compiled model's names, which begin with _orig_mod.")
    add("--raw", action="store_true", help="write the trained weights of a run, not their moving average; into a file")
    add(
        "--weights",
        default="float32",
        choices=get_args(WeightDtype),
        help="onnx, aoti, torchscript, web: how the file keeps the weights; it computes in float32",
    )
    add("--data", type=os.path.expanduser, metavar="DATA_PATH", help="with mlx, too: the puzzles of the comparison")
    settings = parser.parse_args(argv)
    output = settings.output
    settings.is_segment = settings.format in SEGMENT_FORMATS  # a program is written, and not weights alone
    # A folder with a card is written; with --push alone there is no output.
    settings.is_folder = settings.format == "native" and (output is None or output.suffix != ".safetensors")
    if output is None and settings.push is None:
        raise UserError("-o (or --push) is missing; --help shows the options")
    # A folder's name may have a dot, as in urm-v1.0. A word after it is rather a mistyped ending.
    if settings.is_folder and output is not None and re.fullmatch(r"\.[A-Za-z]\w*", output.suffix):
        raise UserError(
            f"-o {output} has to end in .safetensors, the only format that can describe the model; rename it, or give "
            "--format hrm, or the name of a folder without an ending"
        )
    if settings.format == "web" and output is not None and (output.suffix != ".html" or output.is_dir()):
        raise UserError(f"-o {output} is no name of a page; give NAME.html")
    for option, is_given, suits in (
        ("--compiled", settings.compiled, settings.format in ("hrm", "urm")),
        ("--push", settings.push is not None, settings.is_folder),
        ("--private", settings.private, settings.push is not None),
        ("--raw", settings.raw, not settings.is_folder),
        ("--weights", settings.weights != "float32", settings.is_segment and settings.format != "mlx"),
        ("--data", settings.data is not None, settings.is_segment),
    ):
        if is_given and not suits:
            raise UserError(f"{option} contradicts the other options; leave it out (--help says what it needs)")
    return settings


def export(settings: Namespace) -> str:
    """Write the file or the folder, and return a line about it and the commands that load it.

    After a UserError an earlier file of the same name is as it was.
    """
    if settings.push is not None:
        require_account(settings.push)
    where, output = settings.checkpoint, settings.output
    source = open_source(where, raw=settings.raw)
    model, weights, metadata, step = source.model, source.weights, None, None
    if (settings.format == "native" or settings.is_segment) and (
        model is None or (settings.is_folder and source.checkpoint is None)
    ):
        raise UserError(
            step_around(where)
            or f"{where} is a file of weights, which does not say enough of its model; export the run that wrote it"
        )
    if settings.is_folder:
        return _export_folder(settings, source)
    assert output is not None
    if settings.is_segment:
        from sharing.segment.write import data_of, write_segment

        data_path = data_of(source, settings.data)
        is_page = settings.format == "web"
        with _new_page(output) if is_page else _new_folder(output) as folder:
            host, compared = write_segment(source, settings.format, settings.weights, data_path, folder)
            size = (folder / host.file).stat().st_size
        file = output if is_page else output / host.file
        lines = [f"wrote {file}: {size:,} bytes, weights in {host.weights}", str(compared)]
        if is_page and not host.any_size:
            lines.append(f"  the page needs onnxruntime-web-*.js, which lies beside it in {output.absolute().parent}")
        if settings.format == "onnx" and not isinstance(model, ExportedText):
            lines.append(f"  python solve.py {typed_override('checkpoint', str(output / host.file))} puzzle=...")
        return "\n".join(lines)
    if settings.format == "transformers":
        if not isinstance(model, ExportedText):
            raise UserError(f"{where} is no model of text, and transformers has no other; leave --format out")
        assert isinstance(model.arch, TextConfig)
        with _new_folder(output) as folder:
            write_for_transformers(folder, weights, model.arch, model.max_len, model.special_tokens, source.tokenizer)
        return f'{_summary(output, weights)}\n  AutoModelForCausalLM.from_pretrained("{output}")'
    if settings.format == "native":
        assert model is not None
        metadata = model.as_metadata()
    else:
        arch = arch_of(weights)
        if model is not None:
            _require_published(model.arch, where)
        weights = to_published(weights, "puzzles", arch, compiled=settings.compiled)
        if (arch == "urm") != (settings.format == "urm"):
            raise UserError(f"{where} is a model of {arch.upper()}; give --format {'urm' if arch == 'urm' else 'hrm'}")
        if arch == "urm":
            step = open_weights(where).step() if model is None else model.step
    with _writing(output):
        write_weights(output, weights, metadata, step=step)
    return "\n".join([_summary(output, weights), *_commands(str(output), settings, source)])


def _export_folder(settings: Namespace, source: Source) -> str:
    assert source.model is not None
    address = str(settings.output) if settings.push is None else f"hf://{settings.push}"
    # A card names no folders of this machine.
    texts = recipe_and_card(source, Path(address).name if os.path.isabs(address) else address)
    lines = [] if settings.output is None else [f"{_summary(settings.output, source.weights)}, {' and '.join(texts)}"]
    with _new_folder(settings.output) as folder:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        if source.tokenizer is not None:
            shutil.copyfile(source.tokenizer, folder / source.tokenizer.name)
        # The name of a run is its owner's matter.
        write_weights(folder / FILE, source.weights, source.model.model_copy(update={"run": ""}).as_metadata())
        if settings.push is not None:
            message = f"Upload {source.model.title} after step {source.model.step}"
            url = upload(folder, settings.push, private=settings.private, message=message)
            lines.append(f"uploaded to {url}")
    return "\n".join([*lines, *_commands(address, settings, source)])


def _summary(output: Path, weights: Weights) -> str:
    return f"wrote {output}: {len(weights)} tensors, {sum(t.numel() for t in weights.values()):,} numbers"


@contextmanager
def _writing(output: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"can't write {output or 'a temporary folder'} ({error.strerror}); check the folder and its free space, or "
            "change -o"
        ) from error


@contextmanager
def _new_folder(output: Path | None) -> Iterator[Path]:
    """Give a folder to fill, which becomes the output when it is whole."""
    if output is not None and os.path.lexists(output):
        raise UserError(f"-o {output} exists; remove it, or give the name of a new folder")
    beside = None if output is None else output.absolute().parent
    with _writing(output), TemporaryDirectory(dir=beside, prefix=INCOMPLETE, ignore_cleanup_errors=True) as around:
        folder = Path(around) / "model"
        folder.mkdir()
        yield folder
        if output is not None:
            folder.rename(output)


@contextmanager
def _new_page(output: Path) -> Iterator[Path]:
    """Give a folder whose page.html becomes the output, with the page's other files beside it."""
    beside = output.absolute().parent
    with _writing(output), TemporaryDirectory(dir=beside, prefix=INCOMPLETE, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
        page = Path(folder) / "page.html"
        for file in {*Path(folder).iterdir()} - {page}:
            file.replace(beside / file.name)
        page.replace(output)


def _commands(address: str, settings: Namespace, source: Source) -> list[str]:
    """Return the commands that load what is at this address, as they are typed."""
    file, data, model = typed_override("checkpoint", address), "data_path=...", source.model
    if source.data_paths:
        data = typed_override("data_path", source.data_paths[0])
    if model is None:
        return [f"  python evaluate.py {file} {data} arch=...   # with the options that it was trained with"]
    if settings.format == "native":
        asked = "puzzle=..."
        if isinstance(model, ExportedText):
            asked = "prompt=..." if model.tokenizer == "bytes" else f"{data} prompt=..."
        return [
            f"  python evaluate.py {file} {data}",
            f"  python solve.py {file} {asked}",
            f"  python pretrain.py {typed_override('init_from', address)} {data}",
        ]
    arch = model.arch
    assert isinstance(arch, CommonConfig)
    published = _for_published_code(arch, address, compiled=settings.compiled)
    return [f"  python evaluate.py {file} {data} {for_shell(overrides_of(arch))}", f"  {published}"]


def overrides_of(arch: ArchConfig) -> list[str]:
    """Return the overrides that choose an architecture: a name of config/arch, and what differs."""
    choice, options = typed_options("arch", dict(flatten(arch.model_dump(mode="json"))))
    return [f"arch={choice}", *(f"arch.{key}={as_override(value)}" for key, value in options.items())]


def _for_published_code(arch: CommonConfig, file: str, *, compiled: bool) -> str:
    """Return a line that says how the published code loads the file."""
    if file.endswith(".safetensors"):
        return "the published code reads only files of torch.save; name the file otherwise to load it there"
    # The published TRM builds a state of another length otherwise.
    if isinstance(arch, TokenConfig) and not arch.puzzle_emb_ndim:
        arch = arch.model_copy(update={"puzzle_emb_len": 0})
    ours = dict(flatten(read_config("pretrain", [f"arch={arch.name}"])["arch"]))
    named = _OF_URM if arch.name == "urm" else {}
    options = {theirs: getattr(arch, own) for own, theirs in named.items()}
    for key, value in flatten(arch.model_dump(mode="json")):
        is_known = key == "loss.loss_type" or not key.startswith("loss.")
        if is_known and key not in named and ours.get(key, ...) != value:
            options[key] = value
    # ++ sets a key that their YAML has, and adds one that it lacks.
    plus = "" if arch.name == "hrm" else "++"
    typed = for_shell(
        [_CHOSEN[arch.name], *(f"{plus}arch.{key}={as_override(value)}" for key, value in options.items())]
    )
    if arch.name == "hrm":
        return f"the published HRM code: evaluate.py with these options in all_config.yaml beside it: {typed}"
    # A model that it compiles, as it does by default, has other names.
    uncompiled = "" if compiled else "DISABLE_COMPILE=1 "
    load, title = typed_override("++load_checkpoint", file), arch.name.upper().replace("_", "-")
    return f"the published {title} code: {uncompiled}python pretrain.py {load} {typed}"


def _require_published(arch: ArchConfig, where: str) -> None:
    """Raise UserError if the published code computes something else, which names don't show."""
    if not isinstance(arch, CommonConfig):
        raise UserError(f"arch={arch.name} is a model of text, which the published code of puzzles can't load")
    options: dict[str, tuple[Any, ...]] = {"name": tuple(_COMPUTED), "width_multiple": (256,)}
    options |= _COMPUTED.get(arch.name, {})
    if arch.name in ("hrm", "urm") and arch.puzzle_emb_ndim:
        options["puzzle_emb_len"] = (0, math.ceil(arch.puzzle_emb_ndim / arch.hidden_size))
    for option, published in options.items():
        if (value := getattr(arch, option)) not in published:
            raise UserError(
                f"{where} has arch.{option}={value}, which the published code doesn't know; only "
                f"{' or '.join(map(str, published))} can be written for it; leave --format out for a file that this "
                "project reads"
            )


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, 2 after a mistake of the user, 130 after Ctrl-C."""
    return run_command(lambda arguments: export(parse_settings(arguments)), argv)


if __name__ == "__main__":
    sys.exit(main())
