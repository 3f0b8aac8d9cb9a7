"""Build a dataset of text from plain text, JSONL, CSV, TSV and problems that are generated here."""

import dataclasses
import hashlib
import itertools
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

from dataset.builder import ONE_OF_THESE, OUTPUT_DIR, SPLITS, Builder, Typed, Written, option, progress, seed_option
from dataset.schema import SplitName
from dataset.text.generated import generate
from dataset.text.sources import Document, files_of, read_documents, require_separator
from dataset.text.tokenizer import LEAST_BPE, ByteTokenizer, FileTokenizer, Tokenizer, train_bpe
from dataset.text.writer import TextSplitWriter
from utils.errors import UserError
from utils.out_of_memory import LESS_AT_A_TIME
from utils.text import one_line

DEFAULT_TEST_SHARE, DEFAULT_NUM = 0.05, 1000
# So many bytes of text go to the tokenizer at a time. It uses all cores for them.
BATCH_BYTES = 1 << 20
# If all documents have fewer bytes than this, the test share is exact.
FEW_BYTES = 1 << 21
MOST_TASKS = 1000

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

_TEST, _TOKENS = f"what is for testing {ONE_OF_THESE})", f"tokens {ONE_OF_THESE}; default: bytes)"


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    `test_share` is None if there are test sources. `generate_num` is None unless problems are
    generated.
    """

    output_dir: Path = OUTPUT_DIR
    source: list[Path] | None = option("FILE", "text, .jsonl, .csv, .tsv, or folders")
    generate: list[str] | None = option("TASK", "problems of these tasks of reasoning-gym")
    generate_num: int | None = option("N", f"problems of each task (default: {DEFAULT_NUM:,})", at_least=1)
    test_source: list[Path] | None = option("FILE", "files of their own", group=_TEST)
    test_share: float | None = option("X", f"share of the documents (default: {DEFAULT_TEST_SHARE})", group=_TEST)
    separator: str | None = option("TEXT", "what divides the documents of plain text, such as '<|endoftext|>'")
    max_len: int = option("N", "most tokens to read of a sample (default: %(default)s)", default=1024, at_least=2)
    skip_long: bool = option(None, "leave out problems that are longer, instead of refusing them", default=False)
    tokenizer: Path | None = option("FILE", "a tokenizer.json of the tokenizers library", group=_TOKENS)
    train_bpe: int | None = option(
        "V", "train one of V tokens on the training documents", group=_TOKENS, at_least=LEAST_BPE
    )
    seed: int = seed_option()


def complete(typed: Typed) -> None:
    if typed.seed >= 2**64:
        raise UserError(f"--seed is {typed.seed}; give a number below 2^64")
    if typed.separator == "":
        raise UserError("--separator is empty; give the text between two documents, or leave it out")
    if typed.test_share is not None and not 0 < typed.test_share < 1:
        raise UserError(f"--test-share is {typed.test_share}; it must be between 0 and 1")
    if typed.source is None and typed.generate is None:
        raise UserError("there is nothing to read; give files with --source, or tasks with --generate")
    if typed.generate is not None:
        typed.generate_num = typed.generate_num or DEFAULT_NUM
    elif typed.generate_num is not None:
        raise UserError("--generate-num needs --generate; add --generate TASK... or leave --generate-num out")
    if typed.test_share is None and typed.test_source is None:
        typed.test_share = DEFAULT_TEST_SHARE


def split_documents(settings: Settings, left_out: Counter[str]) -> Iterator[tuple[SplitName, Document]]:
    """Yield every document with its split. No document is in both.

    Without test sources a hash of the document and the seed decides, so copies stay together. The
    share is exact for a few MB, with one document at least, and nearly exact for more.
    Otherwise a document of the training files that is in the test files, too, is left out.
    `left_out` counts the documents that are left out, by reason.
    """
    documents = _documents(settings, settings.source, left_out)
    if settings.test_source is None:
        assert settings.test_share is not None
        few, num_bytes = list[Document](), 0
        while num_bytes < FEW_BYTES and (document := next(documents, None)):
            few.append(document)
            num_bytes += document.num_bytes
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
    for document in _documents(dataclasses.replace(settings, generate=None), settings.test_source, left_out):
        in_test.add(_key(document))
        yield "test", document
    for document in documents:
        if _key(document) in in_test:
            left_out["for training that are in --test-source, too"] += 1
        else:
            yield "train", document


def _documents(settings: Settings, files: list[Path] | None, left_out: Counter[str]) -> Iterator[Document]:
    """Yield the documents of files, and then the generated problems."""
    separator = None if settings.separator is None else os.fsencode(settings.separator)
    of_files = itertools.chain.from_iterable(read_documents(file, separator) for file in files or ())
    problems = generate(settings.generate or [], settings.generate_num or DEFAULT_NUM, settings.seed)
    for document in itertools.chain(of_files, problems):
        if not document.text:
            left_out["without a text or a response"] += 1
            continue
        if settings.tokenizer or settings.train_bpe:
            try:
                document.text.decode("utf-8")  # the texts of JSON and CSV have been decoded already
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{document.place}: is not UTF-8 ({one_line(error)}), which a tokenizer needs; "
                    "convert the file, or leave the tokenizer out to read bytes"
                ) from None
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
        num_bytes += document.num_bytes
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def make_tokenizer(folder: Path, settings: Settings) -> Tokenizer:
    """Return the tokenizer, and put its file into the folder of the dataset."""
    file = folder / "tokenizer.json"
    if settings.train_bpe is not None:
        with progress("training the tokenizer", None, "documents") as bar:

            def texts() -> Iterator[bytes]:
                for split, document in split_documents(settings, Counter()):
                    if split == "train":
                        bar.update()
                        yield from filter(None, (document.instruction, document.text))

            train_bpe(texts(), settings.train_bpe, file)
    elif settings.tokenizer is None:
        return ByteTokenizer()
    else:
        FileTokenizer(settings.tokenizer)
        shutil.copyfile(settings.tokenizer, file)
    return FileTokenizer(file)


def write(folder: Path, settings: Settings) -> Written:
    """Write both splits, and the tokenizer. Raise UserError if the input is bad."""
    sources, test_sources = (each and files_of(each) for each in (settings.source, settings.test_source))
    settings = dataclasses.replace(settings, source=sources, test_source=test_sources)
    if settings.separator is not None:
        require_separator([*(sources or ()), *(test_sources or ())], os.fsencode(settings.separator))
    tokenizer = make_tokenizer(folder, settings)
    left_out: Counter[str] = Counter()
    tasks: dict[str, int] = {}
    with ExitStack() as stack:
        writers: dict[SplitName, TextSplitWriter] = {
            split: stack.enter_context(TextSplitWriter(folder / split, tokenizer, settings.max_len, tasks))
            for split in SPLITS
        }
        bar = stack.enter_context(progress("writing", None, "documents"))
        for batch in _batches(split_documents(settings, left_out)):
            instructions = tokenizer.encode([document.instruction or b"" for _, document in batch])
            texts = tokenizer.encode([document.text for _, document in batch])
            for (split, document), instruction, text in zip(batch, instructions, texts, strict=True):
                task = tasks.setdefault(document.task, len(tasks))
                if task == MOST_TASKS:
                    raise UserError(f"{document.place}: is of task {MOST_TASKS + 1:,}; leave the key task out")
                if not len(text):
                    raise UserError(
                        f"{document.place}: the tokenizer has no token for this text or response; give another "
                        "--tokenizer, or leave it out to read bytes"
                    )
                length = len(instruction) + len(text) + 2
                if document.instruction is None:
                    writers[split].add_text(text, task)
                elif length <= settings.max_len:
                    writers[split].add_problem(instruction, text, task)
                elif settings.skip_long:
                    left_out["longer than --max-len"] += 1
                else:
                    raise UserError(
                        f"{document.place}: the problem reads {length:,} tokens, above --max-len {settings.max_len:,}; "
                        "raise it, or add --skip-long to leave such problems out"
                    )
            bar.update(len(batch))
        for split, writer in writers.items():
            if not writer.num_samples:
                others = "".join(f" ({num:,} {why} are left out)" for why, num in left_out.items())
                raise UserError(
                    f"no document is for {split}ing{others}; give more documents that differ, or --test-source"
                )
    special = tokenizer.special_tokens
    kinds = "bytes" if isinstance(tokenizer, ByteTokenizer) else "tokenizer.json"
    return None, [
        *(
            f"{split:<6} {each.num_documents:,} documents, {each.num_samples:,} samples, {each.num_tokens:,} tokens"
            for split, each in writers.items()
        ),
        f"tokens {kinds}, start {special.start}, end of instruction {special.end_of_instruction}, end {special.end}: "
        f"vocab_size {tokenizer.vocab_size:,}, max_len {max(writer.longest for writer in writers.values()):,}",
        *(f"left out {num:,} documents {why}" for why, num in left_out.items()),
        *([f"unknown {tokenizer.num_unknown:,} tokens: the tokenizer lacks a part"] if tokenizer.num_unknown else []),
    ]


BUILDER = Builder("build_text_dataset", __doc__, EXAMPLES, "data/text", Settings, complete, write, LESS_AT_A_TIME)
main = BUILDER.main

if __name__ == "__main__":
    sys.exit(main())
