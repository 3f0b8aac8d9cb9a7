"""The config of a training run: which keys may be combined."""

import pytest

from tests.in_process import pretrain_config

NO_TABLE = "arch.puzzle_emb_ndim=0"
NO_EVALUATION = ("eval_interval=null", "eval_every_n_steps=null")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["freeze_weights=true", "freeze=blocks"], "freeze=blocks exclude each other; give one"),
        (["freeze_weights=true", NO_TABLE], "freeze_weights is about the puzzle table, but arch.puzzle_emb_ndim"),
        (["freeze=puzzle_table", NO_TABLE], "freeze=puzzle_table is about the puzzle table, but arch.puzzle_emb_ndim"),
        (["overfit_one_batch=true", "augment=online"], "give augment=none"),
        (["augment_clues=0.3"], "augment_clues=0.3 is part of augment=online"),
        (["init_from=a", "load_checkpoint=b"], "init_from=a and load_checkpoint=b mean the same; give one"),
        (["load_checkpoint=latest"], "give resume=auto"),
        (["global_batch_size=1000001"], "global_batch_size is 1000001, and must be at most 1000000"),
        (["puzzle_table=keep"], "says what becomes of the table of init_from; give that too"),
        (["early_stop_patience=2", "best_metric=null"], "counts evaluations without a better best_metric"),
        (["early_stop_patience=2", *NO_EVALUATION], "counts evaluations without a better best_metric"),
    ],
    ids=str,
)
def test_keys_that_contradict_one_another_are_refused(typed: list[str], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        pretrain_config(*typed)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_keys_that_agree_are_accepted() -> None:
    pretrain_config("best_metric=null", "freeze_weights=true", "init_from=a", "puzzle_table=keep")
    pretrain_config("freeze=blocks", NO_TABLE, "augment=online", "load_checkpoint=b", "puzzle_table=mean")
    pretrain_config("freeze=puzzle_table", "overfit_one_batch=true", "early_stop_patience=2")
    pretrain_config("early_stop_patience=2", "eval_interval=null", "eval_every_n_steps=5")


def test_the_config_names_the_weights_and_the_data() -> None:
    assert pretrain_config().initial_weights is None
    for key in ("init_from", "load_checkpoint"):
        assert pretrain_config(f"{key}=a").initial_weights == "a"
    for typed, train, test in (
        ("data_path=a", ["a"], ["a"]),
        ("data_path=a data_paths=[b,c]", ["b", "c"], ["b", "c"]),
        ("data_paths=[b,c] data_paths_test=[d]", ["b", "c"], ["d"]),
    ):
        config = pretrain_config(*typed.split())
        assert (config.train_paths, config.test_paths) == (train, test)
