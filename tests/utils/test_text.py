"""Words that a message shows are those that a shell takes."""

import shlex

import pytest

from utils.text import for_shell


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("lr=1e-4", "lr=1e-4"),
        ("a b", "'a b'"),
        ("checkpoint='../my lab/s0'", "\"checkpoint='../my lab/s0'\""),
        (r"path='it\'s'", r'''"path='it\'s'"'''),
        ("x='$HOME'", None),
        ("x='`id`'", None),
        ("x='!!'", None),
        ("x='a\\b\"'", None),
    ],
)
def test_a_shell_reads_the_word_that_a_person_reads(word: str, shown: str | None) -> None:
    assert for_shell([word]) == (shown or shlex.quote(word))
    assert shlex.split(for_shell([word, word])) == [word, word]
