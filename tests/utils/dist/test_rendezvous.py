"""Where ranks meet, and which rank is named if it does not arrive."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from utils.dist.rendezvous import store_of_this_attempt, typed_init_method
from utils.errors import UserError


@pytest.mark.parametrize("typed", ["dist.init_method=foo", "++dist.init_method=foo"])
def test_an_invalid_meeting_point_is_refused_before_a_rank_waits(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain.py", typed])
    with pytest.raises(UserError, match=r"dist\.init_method is 'foo'; give env, tcp://host:port or file:///path"):
        typed_init_method()


def test_a_rank_that_does_not_arrive_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utils.dist.rendezvous.START_TIMEOUT", timedelta(seconds=1))
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # rank 1 arrives twice, but does not count for rank 2
            pool.submit(store_of_this_attempt, store, 1, 3)
        with pytest.raises(TimeoutError, match=r"^rank 2 of 3 did not come within 1 s"):
            store_of_this_attempt(store, 0, 3)
    with pytest.raises(TimeoutError, match="rank 0 did not come within 1 s"):
        store_of_this_attempt(store, 1, 3)
