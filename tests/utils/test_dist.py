"""World: what ranks say to one another, on real gloo processes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import utils.dist as dist_module
from tests.spawn import run_ranks
from utils.dist import Launch, UserError, World

SIZES = [1, 2, 4]


@given(num_slots=st.integers(0, 1000), size=st.integers(1, 16))
def test_slices_cover_every_slot_once(num_slots: int, size: int) -> None:
    shares = [list(range(num_slots))[World(rank=rank, size=size).slice_of(num_slots)] for rank in range(size)]
    assert [slot for share in shares for slot in share] == list(range(num_slots))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def _collectives(world: World) -> None:
    rank, size = world.rank, world.size
    ranks = torch.arange(size)
    rows = torch.tensor([[rank, 10 * rank], [rank, -rank]])
    expected = torch.cat([torch.tensor([[r, 10 * r], [r, -r]]) for r in range(size)])
    torch.testing.assert_close(world.gather_rows(rows), expected, rtol=0, atol=0)
    # A transposed view has the same rows, and the wire wants contiguous memory.
    torch.testing.assert_close(world.gather_rows(rows.T.contiguous().T), expected, rtol=0, atol=0)
    assert world.gather_rows(rows > 0).dtype == torch.bool

    total = world.sum_(torch.tensor([1.0, float(rank)], dtype=torch.float64))
    assert total.tolist() == [size, float(ranks.sum())]
    to_main = world.sum_to_main_(torch.tensor([float(rank + 1)]))
    assert not world.is_main or to_main.item() == float((ranks + 1).sum())

    ours = [torch.full((3,), float(rank)), torch.tensor(rank)]
    world.broadcast_(ours)
    assert ours[0].tolist() == [0, 0, 0] and ours[1].item() == 0

    assert world.broadcast_object({"rank": rank}) == {"rank": 0}
    assert world.gather_objects(f"rank {rank}") == [f"rank {r}" for r in range(size)]
    assert not world.any(False)
    assert world.any(rank == size - 1)


@pytest.mark.parametrize("world_size", SIZES)
def test_collectives(world_size: int) -> None:
    run_ranks(_collectives, world_size)


def _gradients(rank: int) -> list[torch.Tensor]:
    """Integers, for which every order of summation is exact; of sizes around that of a bucket, and without elements."""
    generator = torch.Generator().manual_seed(rank)
    shapes = [(3,), (4, 5), (), (16,), (17,), (0,), (2, 3, 4), (1,)]
    return [torch.randint(-50, 50, shape, generator=generator).float() for shape in shapes]


def _sum_gradients(world: World) -> None:
    dist_module._BUCKET_BYTES = 64  # 16 floats
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in _gradients(0)]
    for parameter, gradient in zip(parameters, _gradients(world.rank), strict=True):
        # A gradient may be a view with strides of its own.
        parameter.grad = gradient.T.contiguous().T if gradient.ndim == 2 else gradient
    world.sum_gradients_(parameters)
    for index, parameter in enumerate(parameters):
        expected = torch.stack([_gradients(rank)[index] for rank in range(world.size)]).sum(0)
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("world_size", SIZES)
def test_gradients_are_summed_over_buckets(world_size: int) -> None:
    run_ranks(_sum_gradients, world_size)


def _agreement(world: World) -> list[str]:
    said = []
    mistakes: list[dict[int, Exception]] = [
        {1: ValueError("a value\nover two lines; mend it")},
        {0: OSError(28, "No space left on device"), 1: ValueError("the second to fail is not heard")},
        {1: ValueError()},
        {},
    ]
    for mistake in mistakes:
        try:
            with world.agree():
                if world.rank in mistake:
                    raise mistake[world.rank]
            said.append("")
        except UserError as error:
            said.append(str(error))
            assert (error.__cause__ is not None) == (world.rank in mistake)
    return said


def test_a_mistake_on_one_rank_is_everybodys() -> None:
    expected = ["a value over two lines; mend it", "[Errno 28] No space left on device", "ValueError", ""]
    assert run_ranks(_agreement, 2) == [expected, expected]


def test_agree_leaves_faults_alone() -> None:
    with pytest.raises(KeyError, match="ours"), World.single().agree():
        raise KeyError("ours")


def _dies_or_waits(world: World) -> None:
    if world.rank == 1:
        raise RuntimeError("rank 1 gave up")
    world.barrier()


def test_helper_reports_the_rank_that_fails() -> None:
    with pytest.raises(AssertionError, match=r"rank [01]:"):
        run_ranks(_dies_or_waits, 2)


def _use_device(world: World) -> str:
    with pytest.raises(UserError, match=r"device=cuda, but PyTorch finds no CUDA device.*device=cpu"):
        world.use_device("cuda", timeout_s=5)
    ready = world.use_device("cpu", timeout_s=5)
    assert ready.sum_(torch.ones(1)).item() == world.size
    return str(ready.device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("world_size", [1, 2])
def test_device_that_is_not_there(world_size: int) -> None:
    assert run_ranks(_use_device, world_size) == ["cpu"] * world_size


def test_launch_is_the_same_for_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert Launch.from_environment() == Launch(restarts=0, identity=None)
    for run_id in ("job-7", "none"):  # torchrun says "none" where no rendezvous id was given
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        identities = []
        for restarts in range(2):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
            assert Launch.from_environment().restarts == restarts
            identities.append(Launch.from_environment().identity)
        assert identities[0] == identities[1] not in (None, "", "none")
