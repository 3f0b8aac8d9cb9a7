"""Build a dataset of text from plain text, JSONL, CSV, TSV and problems that are generated here.

Files are read as a stream, so a file of GBs needs little memory. The documents and the settings,
with the seed, decide every byte of the dataset. It appears under its name only when it is whole.
"""

import dataclasses
import hashlib
import itertools
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])


from dataset.builder import SPLITS, builder_parser, new_dataset, progress, record_of, summary, write_fingerprints
from dataset.schema import SplitName
from dataset.text.generated import generate
from dataset.text.schema import check_text_contents, open_text_split
from dataset.text.sources import Document, files_of, read_documents, require_separator
from dataset.text.tokenizer import LEAST_BPE, ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from dataset.text.writer import TextSplitWriter
from utils.arguments import check_at_least, check_exclusive, typed_path
from utils.errors import UserError
from utils.shell import run_command
from utils.terminal import tell
from utils.text import one_line

PROGRAM = "build_text_dataset"
DEFAULT_TEST_SHARE, DEFAULT_NUM = 0.05, 1000
# So many bytes of text go to the tokenizer at a time. It uses all cores for them.
BATCH_BYTES = 1 << 20
# What a document takes beside its text, roughly.
DOCUMENT_BYTES = 256
# If all documents have fewer bytes than this, the test share is exact.
FEW_BYTES = 1 << 21
MOST_TASKS = 1000
# Published files of text have this between their documents.
END_OF_TEXT = "<|endoftext|>"

EXAMPLES = """
examples:
  # a book, one token for each byte; 5 % of the passages are for testing
  python dataset/build_text_dataset.py --output-dir data/book --source book.txt

  # problems with answers, and others for testing; samples of 512 tokens at most
  python dataset/build_text_dataset.py --output-dir data/problems \\
      --source train.jsonl --test-source test.jsonl --max-len 512

  # problems in words, 10,000 of each task (pip install -r requirements-text.txt)
  python dataset/build_text_dataset.py --output-dir data/reasoning \\
      --generate basic_arithmetic number_sorting mini_sudoku --generate-num 10000

  # a folder, whose plain texts have a line between their documents
  python dataset/build_text_dataset.py --output-dir data/stories --source stories \\
      --separator '<|endoftext|>'

JSONL, CSV and TSV hold `text`, or `instruction` and `response`, and may name a `task`. Any other file
is plain text, which is cut into documents of 16 KiB at most, at blank lines. Each file may end with
.gz. A text is cut into samples of --max-len tokens. A problem is one sample.
"""


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    `test_share` is None if there are test sources. `generate_num` is None unless problems are
    generated.
    """

    output_dir: Path
    source: list[Path] | None
    generate: list[str] | None
    generate_num: int | None
    test_source: list[Path] | None
    test_share: float | None
    separator: str | None
    max_len: int
    skip_long: bool
    tokenizer: Path | None
    train_bpe: int | None
    seed: int


# --------------------------------------------------------------------------------------------------
# Command line


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Parse the command line.

    Raises:
        UserError: An option is unknown, malformed or in conflict with another.
    """
    description = "Build a dataset of text, of problems with answers in text, or of both."
    parser = builder_parser(PROGRAM, description, EXAMPLES, "data/text")
    add = parser.add_argument
    add("--source", type=typed_path, metavar="FILE", nargs="+", help="text, .jsonl, .csv, .tsv, or folders")
    add("--separator", metavar="TEXT", help="what divides the documents of plain text, such as '<|endoftext|>'")
    add("--generate", metavar="TASK", nargs="+", help="problems of these tasks of reasoning-gym")
    add("--generate-num", type=int, metavar="N", help=f"problems of each task (default: {DEFAULT_NUM:,})")
    add("--max-len", type=int, metavar="N", default=1024, help="most tokens to read of a sample (default: %(default)s)")
    add("--skip-long", action="store_true", help="leave out problems that are longer, instead of refusing them")

    add = parser.add_argument_group("what is for testing (one of these)").add_argument
    add("--test-share", type=float, metavar="X", help=f"share of the documents (default: {DEFAULT_TEST_SHARE})")
    add("--test-source", type=typed_path, metavar="FILE", nargs="+", help="files of their own")

    add = parser.add_argument_group("tokens (one of these; default: bytes)").add_argument
    add("--tokenizer", type=typed_path, metavar="FILE", help="a tokenizer.json of the tokenizers library")
    add("--train-bpe", type=int, metavar="V", help="train one of V tokens on the training documents")

    settings = Settings(**vars(parser.parse_args(argv)))
    check_at_least(settings, max_len=2, seed=0, train_bpe=LEAST_BPE, generate_num=1)
    if settings.seed >= 2**64:
        raise UserError(f"--seed is {settings.seed}; give a number below 2^64")
    if settings.separator == "":
        raise UserError("--separator is empty; give the text between two documents, or leave it out")
    check_exclusive(settings, "test_share", "test_source")
    check_exclusive(settings, "tokenizer", "train_bpe")
    if settings.test_share is not None and not 0 < settings.test_share < 1:
        raise UserError(f"--test-share is {settings.test_share}; it must be between 0 and 1")
    if settings.source is None and settings.generate is None:
        raise UserError("there is nothing to read; give files with --source, or tasks with --generate")
    if settings.generate_num is not None and settings.generate is None:
        raise UserError("--generate-num needs --generate; add --generate TASK... or leave --generate-num out")
    if settings.generate is not None:
        settings = dataclasses.replace(settings, generate_num=settings.generate_num or DEFAULT_NUM)
    if settings.test_share is None and settings.test_source is None:
        return dataclasses.replace(settings, test_share=DEFAULT_TEST_SHARE)
    return settings


# --------------------------------------------------------------------------------------------------
# Documents


def split_documents(settings: Settings, left_out: Counter[str]) -> Iterator[tuple[SplitName, Document]]:
    """Yield every document with its split. No document is in both.

    Without test sources a hash of the document and the seed decides, so copies stay together. The
    share is exact for a few MB, with one document at least, and nearly exact for more.
    Otherwise a document of the training files that is in the test files, too, is left out.

    Args:
        left_out: counts the documents that are left out, by reason.

    Raises:
        UserError: A file is missing or malformed.
    """
    if settings.test_source is None:
        assert settings.test_share is not None
        documents = _with_text(_main_documents(settings), left_out)
        few = list(_few(documents))
        following = next(documents, None)
        limit = int(settings.test_share * 2**64)
        if following is None:  # those are all documents, so the share can be exact
            keys = sorted({_key(document, settings.seed) for document in few})
            if len(keys) > 1:  # both splits get at least one
                limit = keys[min(len(keys) - 1, max(1, round(settings.test_share * len(keys))))]
        for document in itertools.chain(few, [following] if following else [], documents):
            yield "test" if _key(document, settings.seed) < limit else "train", document
        return
    in_test: set[int] = set()
    for document in _with_text(_of_files(settings.test_source, settings), left_out):
        in_test.add(_key(document))
        yield "test", document
    for document in _with_text(_main_documents(settings), left_out):
        if _key(document) in in_test:
            left_out["for training that are in --test-source, too"] += 1
        else:
            yield "train", document


def _main_documents(settings: Settings) -> Iterator[Document]:
    problems = generate(settings.generate or [], settings.generate_num or DEFAULT_NUM, settings.seed)
    return itertools.chain(_of_files(settings.source or [], settings), problems)


def _of_files(files: list[Path], settings: Settings) -> Iterator[Document]:
    separator = None if settings.separator is None else os.fsencode(settings.separator)
    return itertools.chain.from_iterable(read_documents(file, separator) for file in files)


def _with_text(documents: Iterator[Document], left_out: Counter[str]) -> Iterator[Document]:
    for document in documents:
        if document.text:
            yield document
        else:
            left_out["without a text or a response"] += 1


def _few(documents: Iterator[Document]) -> Iterator[Document]:
    """Yield the first documents, which take no more than FEW_BYTES and one document."""
    num_bytes = 0
    while num_bytes < FEW_BYTES and (document := next(documents, None)):
        num_bytes += document.num_bytes + DOCUMENT_BYTES
        yield document


def _key(document: Document, seed: int = 0) -> int:
    """Return a hash of 64 bits. Problems with one instruction have one key."""
    contents = document.text if document.instruction is None else document.instruction
    digest = hashlib.blake2b(contents, digest_size=8, key=str(seed).encode())
    return int.from_bytes(digest.digest(), "big")


def _batches(documents: Iterator[tuple[SplitName, Document]]) -> Iterator[list[tuple[SplitName, Document]]]:
    batch, num_bytes = [], 0
    for split, document in documents:
        batch.append((split, document))
        num_bytes += document.num_bytes + DOCUMENT_BYTES
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


# --------------------------------------------------------------------------------------------------
# The dataset


def make_tokenizer(folder: Path, settings: Settings) -> Tokenizer:
    """Return the tokenizer, and put its file into the folder of the dataset.

    Raises:
        UserError: A package is missing, or the file is no tokenizer.
    """
    file = folder / "tokenizer.json"
    if settings.train_bpe is not None:
        documents = (each for split, each in split_documents(settings, Counter()) if split == "train")
        with progress("training the tokenizer", None, "documents") as bar:

            def texts() -> Iterator[bytes]:
                for document in documents:
                    bar.update()
                    yield from (_characters(document, text) for text in (document.instruction, document.text) if text)

            train_bpe(texts(), settings.train_bpe, file)
    elif settings.tokenizer is None:
        return ByteTokenizer()
    else:
        FileTokenizer(settings.tokenizer)
        shutil.copyfile(settings.tokenizer, file)
    return FileTokenizer(file)


def _characters(document: Document, text: bytes) -> bytes:
    """Return the text. Raise UserError if it is not UTF-8."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{document.place}: is not UTF-8 ({one_line(error)}), which a tokenizer needs; "
            "convert the file, or leave the tokenizer out to read bytes"
        ) from None
    return text


def write_splits(folder: Path, settings: Settings, tokenizer: Tokenizer, left_out: Counter[str]) -> list[str]:
    """Write both splits, and return lines that describe them."""
    tasks: dict[str, int] = {}
    first_marked = ""
    with ExitStack() as stack:
        writers: dict[SplitName, TextSplitWriter] = {
            split: stack.enter_context(TextSplitWriter(folder / split, tokenizer, settings.max_len)) for split in SPLITS
        }
        bar = stack.enter_context(progress("writing", None, "documents"))
        for batch in _batches(split_documents(settings, left_out)):
            if settings.tokenizer or settings.train_bpe:
                for _, document in batch:
                    _characters(document, document.text)  # JSON and CSV have been decoded already
            marked = (document.place for _, document in batch if END_OF_TEXT.encode() in document.text)
            first_marked = first_marked or next(marked, "")
            instructions = tokenizer.encode([document.instruction or b"" for _, document in batch])
            texts = tokenizer.encode([document.text for _, document in batch])
            for (split, document), instruction, text in zip(batch, instructions, texts, strict=True):
                task = tasks.setdefault(document.task, len(tasks))
                if task == MOST_TASKS:
                    raise UserError(
                        f"{document.place}: is of task {MOST_TASKS + 1:,}, but a task is for many problems; leave the "
                        "key task out"
                    )
                if not len(text):
                    raise UserError(
                        f"{document.place}: the tokenizer has no token for this text or response; give another "
                        "--tokenizer, or leave it out to read bytes"
                    )
                writer = writers[split]
                if document.instruction is None:
                    writer.add_text(text, task)
                elif (length := writer.problem_len(instruction, text)) <= settings.max_len:
                    writer.add_problem(instruction, text, task)
                elif settings.skip_long:
                    left_out["longer than --max-len"] += 1
                else:
                    raise UserError(
                        f"{document.place}: the problem reads {length:,} tokens, above --max-len {settings.max_len:,}; "
                        "raise it, or add --skip-long to leave such problems out"
                    )
            bar.update(len(batch))
    if first_marked and settings.separator != END_OF_TEXT:
        tell(
            f"note: {END_OF_TEXT} is read as text, first in {first_marked}; --separator '{END_OF_TEXT}' divides plain "
            "text there"
        )
    for split, writer in writers.items():
        if not writer.num_samples:
            others = "".join(f" ({num:,} {why} are left out)" for why, num in left_out.items())
            raise UserError(f"no document is for {split}ing{others}; give more documents that differ, or --test-source")
        writer.describe(list(tasks))
    return [
        f"{split:<6} {writer.num_documents:,} documents, {writer.num_samples:,} samples, {writer.num_tokens:,} tokens"
        for split, writer in writers.items()
    ]


def build(settings: Settings) -> str:
    """Build the dataset and return a summary of it.

    Raises:
        UserError: The input is bad, or the folder can't be written. No new dataset is left then.
    """
    started = time.perf_counter()
    left_out: Counter[str] = Counter()
    with new_dataset(settings.output_dir) as folder:
        expanded = dataclasses.replace(
            settings,
            source=settings.source and files_of(settings.source),
            test_source=settings.test_source and files_of(settings.test_source),
        )
        if settings.separator is not None:
            files = [*(expanded.source or ()), *(expanded.test_source or ())]
            require_separator(files, os.fsencode(settings.separator))
        tokenizer = make_tokenizer(folder, expanded)
        lines = write_splits(folder, expanded, tokenizer, left_out)
        # This is the code with which training reads the dataset.
        splits = {split: open_text_split(folder, split) for split in SPLITS}
        fingerprints = {split: check_text_contents(opened) for split, opened in splits.items()}
        write_fingerprints(folder, fingerprints, record_of(PROGRAM, settings))
    special = tokenizer.special_tokens
    kinds = "bytes" if settings.tokenizer is None and settings.train_bpe is None else "tokenizer.json"
    lines += [
        f"tokens {kinds}, start {special.start}, end of instruction {special.end_of_instruction}, end {special.end}: "
        f"vocab_size {tokenizer.vocab_size:,}, max_len {max(split.metadata.max_len for split in splits.values()):,}",
        *(f"left out {num:,} documents {why}" for why, num in left_out.items()),
        *([f"unknown {tokenizer.num_unknown:,} tokens: the tokenizer lacks a part"] if tokenizer.num_unknown else []),
    ]
    return summary(settings.output_dir, started, lines, fingerprints)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    return run_command(lambda arguments: build(parse_settings(arguments)), argv)


if __name__ == "__main__":
    sys.exit(main())
