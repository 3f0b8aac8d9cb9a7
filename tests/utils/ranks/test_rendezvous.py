"""Where ranks meet, and which rank is named if it does not arrive."""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.spawn import free_port
from utils.errors import UserError
from utils.ranks import rendezvous
from utils.ranks.config import DEFAULT_MEETING
from utils.ranks.launch import Launch
from utils.ranks.rendezvous import MissingRank, Patience, open_store, require_meeting_point, store_of_this_attempt


def _launch(rank: int, port: int | None, host: str = "127.0.0.1", name: str = "") -> Launch:
    return Launch("slurm", rank=rank, size=2, host=host, port=port, name=name)


def test_a_rank_that_does_not_arrive_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    said = r"^rank 2 of 3 did not come within 1 s; dist.start_timeout_s sets"
    with ThreadPoolExecutor(2) as pool:
        # Rank 1 arrives twice, but does not count for rank 2.
        arrived = [pool.submit(store_of_this_attempt, store, 1, 3, Patience(3)) for _ in range(2)]
        with pytest.raises(MissingRank, match=said):
            store_of_this_attempt(store, 0, 3, Patience(1))
        # The one that counts hears it from rank 0.
        assert any(re.match(said, str(each.exception())) for each in arrived)
    with pytest.raises(MissingRank, match="rank 0 did not come within 1 s"):
        store_of_this_attempt(store, 1, 3, Patience(1))


def test_rank_0_is_named_if_it_does_not_answer() -> None:
    """PyTorch's own client would wait for the answer of another program for ever."""
    port = free_port()
    said = rf"^rank 0 does not answer at 127\.0\.0\.1:{port} \(.*did not come within 1 s"
    with pytest.raises(MissingRank, match=said):
        open_store(_launch(1, port), DEFAULT_MEETING, Patience(1))
    at_ipv6 = DEFAULT_MEETING.model_copy(update={"init_method": f"tcp://[::1]:{port}"})
    with pytest.raises(MissingRank, match=rf"^rank 0 does not answer at ::1:{port} "):
        open_store(_launch(1, None), at_ipv6, Patience(0.1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(MissingRank, match=rf"another program answers at 127\.0\.0\.1:{port}; set MASTER_PORT"):
            open_store(_launch(1, port), DEFAULT_MEETING, Patience(1))


def test_a_place_where_nobody_can_meet_is_one_line() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=rf"^rank 0 can't open port {port}.*it is in use on .*; set MASTER_PORT"):
            open_store(_launch(0, port), DEFAULT_MEETING, Patience(20))
    with pytest.raises(UserError, match=r"are to meet at no-such-host\.invalid, which is not known on .*MASTER_ADDR"):
        open_store(_launch(1, 29500, host="no-such-host.invalid"), DEFAULT_MEETING, Patience(20))
    for host, unset in ((None, 29500), ("a", None)):
        launch = Launch("torchrun", rank=0, size=2, host=host, port=unset)
        with pytest.raises(UserError, match="2 ranks, but nothing says where they meet"):
            require_meeting_point(launch, DEFAULT_MEETING)
        require_meeting_point(launch, DEFAULT_MEETING.model_copy(update={"init_method": "tcp://10.0.0.1:29500"}))


def test_two_launches_on_one_port_do_not_mix() -> None:
    """A rank of the other launch finds this store, but does not become one of its ranks."""
    port = free_port()
    own = open_store(_launch(0, port, name="slurm 1.0"), DEFAULT_MEETING, Patience(20))
    other = open_store(_launch(1, port, name="slurm 2.0"), DEFAULT_MEETING, Patience(20))
    with ThreadPoolExecutor(2) as pool:
        strayed = pool.submit(store_of_this_attempt, other, 1, 2, Patience(1.5))
        with pytest.raises(MissingRank, match=r"^rank 1 of 2 did not come"):
            store_of_this_attempt(own, 0, 2, Patience(1))
        with pytest.raises(MissingRank, match=r"^rank 0 did not come"):
            strayed.result()


def test_a_worker_does_not_wait_long_for_a_torchrun_that_was_killed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not know its launcher, because it was another's child from the start."""
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "TORCHRUN_ANSWERS", timedelta(seconds=1))
    began = time.monotonic()
    with pytest.raises(dist.DistError):
        rendezvous.agents_store(timedelta(minutes=5))
    assert time.monotonic() - began < 20
