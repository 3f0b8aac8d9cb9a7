"""Words that a message shows are those that a shell takes. A time is short."""

import math
import shlex

from utils.text import for_shell, in_words


def test_a_shell_reads_the_word_that_a_person_reads() -> None:
    for word, shown in (
        ("lr=1e-4", "lr=1e-4"),
        ("a b", "'a b'"),
        ("checkpoint='../my lab/s0'", "\"checkpoint='../my lab/s0'\""),
        (r"path='it\'s'", r'''"path='it\'s'"'''),
        ("x='$HOME'", shlex.quote("x='$HOME'")),
        ("x='`id`'", shlex.quote("x='`id`'")),
        ("x='!!'", shlex.quote("x='!!'")),
    ):
        assert for_shell([word]) == shown
        assert shlex.split(for_shell([word, word])) == [word, word]


def test_a_time_in_words() -> None:
    seconds = (59.9, 3599, 7500, 172_800, 302_400, 86_313_599, 86_313_600, math.nan)
    words = [in_words(each) for each in seconds]
    assert words == ["59 s", "59 min", "2 h 05", "2.0 d", "3.5 d", "999.0 d", "> 999 d", "> 999 d"]
