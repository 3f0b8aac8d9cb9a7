"""Where ranks meet, and which rank is named if it does not arrive."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.spawn import free_port
from utils.dist.config import DEFAULT_MEETING
from utils.dist.launch import Launch
from utils.dist.rendezvous import MissingRank, open_store, require_meeting_point, store_of_this_attempt
from utils.errors import UserError

_PATIENT = DEFAULT_MEETING.model_copy(update={"start_timeout_s": 20.0})
_HASTY = DEFAULT_MEETING.model_copy(update={"start_timeout_s": 1.0})


def _launch(rank: int, port: int | None, host: str = "127.0.0.1", name: str = "") -> Launch:
    return Launch("slurm", rank=rank, size=2, host=host, port=port, name=name)


def test_a_rank_that_does_not_arrive_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):  # rank 1 arrives twice, but does not count for rank 2
            pool.submit(store_of_this_attempt, store, 1, 3, 1)
        with pytest.raises(MissingRank, match=r"^rank 2 of 3 did not come within 1 s; dist.start_timeout_s sets"):
            store_of_this_attempt(store, 0, 3, 1)
    with pytest.raises(MissingRank, match="rank 0 did not come within 1 s"):
        store_of_this_attempt(store, 1, 3, 1)


def test_rank_0_is_named_if_nothing_answers() -> None:
    port = free_port()
    with pytest.raises(MissingRank, match=rf"^rank 0 did not come within 1 s: 127\.0\.0\.1:{port} does not answer"):
        open_store(_launch(1, port), _HASTY)


def test_rank_0_is_named_if_another_program_answers() -> None:
    """PyTorch's own client would wait for its answer for ever."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(MissingRank, match=rf"another program answers at 127\.0\.0\.1:{port}; set MASTER_PORT"):
            open_store(_launch(1, port), _HASTY)


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=rf"^rank 0 can't open port {port}.*it is in use on .*; set MASTER_PORT"):
            open_store(_launch(0, port), _PATIENT)


def test_an_unknown_host_is_one_line() -> None:
    with pytest.raises(UserError, match=r"are to meet at no-such-host\.invalid, which is not known on .*MASTER_ADDR"):
        open_store(_launch(1, 29500, host="no-such-host.invalid"), _PATIENT)


def test_two_launches_on_one_port_do_not_mix() -> None:
    """A rank of the other launch finds this store, but does not become one of its ranks."""
    port = free_port()
    own = open_store(_launch(0, port, name="slurm 1.0"), _PATIENT)
    other = open_store(_launch(1, port, name="slurm 2.0"), _PATIENT)
    with ThreadPoolExecutor(2) as pool:
        strayed = pool.submit(store_of_this_attempt, other, 1, 2, 1.5)
        with pytest.raises(MissingRank, match=r"^rank 1 of 2 did not come"):
            store_of_this_attempt(own, 0, 2, 1)
        with pytest.raises(MissingRank, match=r"^rank 0 did not come"):
            strayed.result()


def test_a_missing_meeting_point_is_named() -> None:
    for host, port, expected in (
        (None, 29500, "set MASTER_ADDR to"),
        ("a", None, "set MASTER_PORT to"),
        (None, None, "set MASTER_ADDR and MASTER_PORT to"),
    ):
        launch = Launch("torchrun", rank=0, size=2, host=host, port=port)
        with pytest.raises(UserError, match=f"2 ranks, but nothing says where they meet; {expected}"):
            require_meeting_point(launch, _PATIENT)
        require_meeting_point(launch, _PATIENT.model_copy(update={"init_method": "tcp://10.0.0.1:29500"}))
