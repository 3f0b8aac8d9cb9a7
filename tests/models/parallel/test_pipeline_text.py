"""A pipeline of text computes the same as one process, or is refused (CPU, gloo)."""

# N = tokens of a row, V = vocabulary

from typing import Any

import pytest
import torch
from torch import Tensor

from dataset.schema import IGNORE_LABEL
from models.parallel.layout import Layout
from models.parallel.pipeline import PipelineConfig
from models.parallel.pipeline_text import TextPipelineLayout
from models.text.config import CallCounts, GPTConfig, HRMTextConfig, RINSTextConfig, TransformerTextConfig
from models.text.generation import Decoder
from models.text.model import TextModel
from models.text.objective import TextBatch, TextRow, TextSettings
from models.text.packing import Packing
from models.text.stack_config import Sequences
from tests.models.parallel.helpers import config_of, whole, whole_weights
from tests.models.text.helpers import NUM_TOKENS, VOCAB_SIZE, make_config, make_model
from tests.spawn import run_ranks
from tests.utils.ranks.helpers import dist_config
from utils.errors import UserError
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

NUM_ROWS = 8
NO_GRAD_CALLS = CallCounts(H=0, L=0)
SETTINGS = TextSettings(CallCounts(H=1, L=0), IGNORE_LABEL)
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
# The first model has norms with weights, of which the last one belongs to the last stage.
GPT: dict[str, Any] = {"num_layers": 5}
VARIANTS: list[tuple[type[Any], dict[str, Any]]] = [
    (GPTConfig, GPT),
    (GPTConfig, {**GPT, "activation_checkpointing": "block"}),
    (GPTConfig, {**GPT, "activation_checkpointing": "cycle"}),
    (TransformerTextConfig, GPT),
]


def _config(**options: Any) -> PipelineConfig:
    config = config_of("pipeline", **options)
    assert isinstance(config, PipelineConfig)
    return config


def _sequences(row: int) -> Sequences:
    """Return other lengths for each row. The last row is all padding behind one token."""
    if row == NUM_ROWS - 1:
        return [(1, 0)]
    return [(1 + row % 3, 4), (2, row), (5 - row % 2, 2)]


def _rows() -> list[TextRow]:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number in range(NUM_ROWS):
        sequences = _sequences(number)
        positions_N, filled = torch.zeros(NUM_TOKENS, dtype=torch.int64), sum(map(sum, sequences))
        positions_N[:filled] = torch.cat([torch.arange(prefix + response) for prefix, response in sequences])
        inputs_N, labels_N = torch.randint(VOCAB_SIZE, (2, NUM_TOKENS), generator=generator)
        labels_N[filled:] = IGNORE_LABEL
        rows.append(TextRow(inputs_N, labels_N, positions_N, Packing(sequences, NUM_TOKENS)))
    return rows


def _step(layout: Layout, rows: list[TextRow], world: World) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sums over all rows, the norm of the gradient, and the gradients of this rank."""
    _, outputs, sums = layout.forward_backward(None, TextBatch(rows, 100), SETTINGS, loss_scale=4.0)
    assert outputs == []
    layout.require_gradients()
    grads = {name: whole(layout, name, p.grad) for name, p in layout.model.named_parameters() if p.grad is not None}
    norm = layout.grad_norm()
    layout.model.zero_grad()
    return world.sum_(sums), norm, grads


def _close(ours: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()) + 1e-12, msg=what)


def _compare_step(plain: TextModel, layout: Layout, world: World) -> None:
    alone: Layout = Layout(plain, World.single(), num_microbatches=NUM_ROWS)
    expected = _step(alone, _rows(), World.single())
    found = _step(layout, _rows()[world.slice_of(NUM_ROWS)], world)
    _close(found[0], expected[0], "sums")
    _close(found[1], expected[1], "norm")
    for name, gradient in found[2].items():
        _close(gradient, expected[2][name], name)
    shares = world.gather_objects(sorted(found[2]))
    assert sorted(name for share in shares for name in share) == sorted([*expected[2]] * world.data_size), (
        "every weight must belong to exactly one rank of each pipeline"
    )


def _compare_evaluation(plain: TextModel, layout: Layout, world: World) -> None:
    row = _rows()[world.data_rank]
    arguments = row.inputs_N, row.labels_N, row.positions_N, row.packing
    with torch.no_grad():
        expected, found = (
            model(*arguments, grad_calls=NO_GRAD_CALLS, ignore_label=IGNORE_LABEL) for model in (plain, layout.model)
        )
    for ours, theirs, what in zip(found, expected, ("loss", "losses of the tokens", "right tokens"), strict=True):
        _close(ours.float(), theirs.float(), what)
    assert isinstance(layout.model, TextModel)
    ours, theirs = (
        Decoder(model, PROMPTS, most_new_tokens=4, device=torch.device("cpu")) for model in (layout.model, plain)
    )
    found_BV, expected_BV = ours.read_prompts(), theirs.read_prompts()
    for _ in range(3):
        _close(found_BV, expected_BV, "logits of the next token")
        for decoder in (ours, theirs):
            decoder.keep([2, 0] if len(expected_BV) == 3 else [0, 1])
        tokens_B = torch.tensor([3, 4])
        found_BV, expected_BV = ours.next_logits(tokens_B), theirs.next_logits(tokens_B)


def _check(
    world: World, config: PipelineConfig, num_parts: int, config_class: type[Any], changes: dict[str, Any]
) -> None:
    world = connect_devices(world, "cpu", dist_config(timeout_s=60.0), axes=config.axes(world.size))
    plain, split = (make_model(make_config(config_class, **changes)) for _ in range(2))
    config.require_support(split, world)
    layout = TextPipelineLayout(split, config, world, num_microbatches=num_parts)
    weights = whole_weights(layout, world)
    if world.is_main:
        assert weights.keys() == plain.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state_dict().items())
    held = [*plain.parameters(), *layout.model.parameters()]  # FSDP puts others in their place while it gathers
    _compare_evaluation(plain, layout, world)
    _compare_step(plain, layout, world)
    with torch.no_grad():
        for weight in held:
            weight.mul_(1.1)
    layout.values_changed()
    _compare_evaluation(plain, layout, world)
    _compare_step(plain, layout, world)


def _check_two_ranks(world: World) -> None:
    for config_class, changes in VARIANTS:
        _check(world, _config(microbatches=8), 1, config_class, changes)
    for schedule in ("gpipe", "interleaved"):
        _check(world, _config(microbatches=4, schedule=schedule), 2, GPTConfig, GPT)


def _check_four_ranks(world: World) -> None:
    for options in ({"shard": 2}, {"stages": 2, "shard": 1}, {"shard": 2, "schedule": "interleaved"}):
        _check(world, _config(microbatches=2, **options), 2, GPTConfig, GPT)


def test_a_pipeline_of_text_computes_what_one_process_computes() -> None:
    run_ranks(_check_two_ranks, 2)


@pytest.mark.invariance
def test_two_pipelines_of_text_compute_what_one_process_computes() -> None:
    run_ranks(_check_four_ranks, 4)


@pytest.mark.parametrize("config_class", [HRMTextConfig, RINSTextConfig])
def test_a_recurrent_model_is_refused_with_the_reason(config_class: type[Any]) -> None:
    model = make_model(make_config(config_class))
    with pytest.raises(UserError, match="needs a stack that is gone through once"):
        _config().require_support(model, World(size=2))


def test_a_head_with_the_weights_of_the_embedding_is_refused() -> None:
    model = make_model(make_config(GPTConfig, tie_head=True))
    with pytest.raises(UserError, match=r"arch.tie_head=true gives them the same weights; set it to false"):
        _config().require_support(model, World(size=2))
