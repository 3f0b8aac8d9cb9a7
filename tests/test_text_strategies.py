"""Every strategy computes for text what one process computes (CPU, gloo)."""

# N = tokens of a row, V = vocabulary

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.parallel import ParallelConfig, parallelize
from models.parallel.layout import Layout
from models.parallel.pipeline_text import TextPipelineLayout
from models.text.config import GPTConfig, TextConfig, TransformerTextConfig
from models.text.generation import Decoder
from models.text.model import TextModel
from models.text.objective import TextBatch, TextObjective, TextRow
from models.text.packing import Packing
from models.text.stack_config import Sequences
from tests.models.parallel.helpers import DIST, close, config_of, whole, whole_weights
from tests.models.text.helpers import ARCHS, NUM_TOKENS, VOCAB_SIZE, make_config, make_model
from tests.spawn import run_ranks
from utils.batch import IGNORE_LABEL
from utils.errors import UserError
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

NUM_ROWS, TOLERANCE = 8, 3e-5
FEWER_ROWS = 4  # enough without a pipeline
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
GPT: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
# A pipeline is of a stack. The first model has norms with weights, of which the last one belongs
# to the last stage.
STACKS: list[tuple[type[TextConfig], dict[str, Any]]] = [
    (GPTConfig, {"num_layers": 5}),
    (GPTConfig, {"num_layers": 5, "activation_checkpointing": "block"}),
    (GPTConfig, {"num_layers": 5, "activation_checkpointing": "cycle"}),
    (TransformerTextConfig, {"num_layers": 5}),
]
# Every architecture, with grouped queries, gates, a GELU and a tied head.
MODELS: list[tuple[type[TextConfig], dict[str, Any]]] = [
    *((arch, {"hidden_size": 32, "num_heads": 4}) for arch in ARCHS if arch is not GPTConfig),
    *((GPTConfig, GPT | more) for more in ({}, {"mlp": "gelu", "tie_head": True}, {"num_kv_heads": 4})),
]


def _rows(num_rows: int) -> list[TextRow]:
    """Return rows of other lengths. The last one is all padding behind one token."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for number in range(num_rows):
        sequences: Sequences = [(1 + number % 3, 4), (2, number), (5 - number % 2, 2)]
        sequences = sequences if number < num_rows - 1 else [(1, 0)]
        positions_N, filled = torch.zeros(NUM_TOKENS, dtype=torch.int64), sum(map(sum, sequences))
        positions_N[:filled] = torch.cat([torch.arange(prefix + response) for prefix, response in sequences])
        inputs_N, labels_N = torch.randint(VOCAB_SIZE, (2, NUM_TOKENS), generator=generator)
        labels_N[filled:] = IGNORE_LABEL
        rows.append(TextRow(inputs_N, labels_N, positions_N, Packing(sequences, NUM_TOKENS)))
    return rows


def _step(layout: Layout, rows: list[TextRow], world: World) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sums over all rows, the norm of the gradient, and the gradients of this rank."""
    assert isinstance(layout.model, TextModel)
    settings = layout.model.config.num_calls
    _, outputs, sums = layout.forward_backward(None, TextBatch(rows, 100), settings, loss_scale=4.0)
    assert outputs == []
    layout.require_gradients()
    grads = {name: whole(layout, name, p.grad) for name, p in layout.model.named_parameters() if p.grad is not None}
    norm = layout.grad_norm()
    layout.model.zero_grad()
    return world.sum_(sums), norm, grads


def _compare_step(plain: TextModel, layout: Layout, world: World, *, is_pipeline: bool) -> None:
    num_rows = NUM_ROWS if is_pipeline else FEWER_ROWS
    alone: Layout = Layout(plain, World.single())
    alone.num_microbatches = num_rows
    expected = _step(alone, _rows(num_rows), World.single())
    found = _step(layout, _rows(num_rows)[world.slice_of(num_rows)], world)
    close(found[0], expected[0], "sums", TOLERANCE)
    close(found[1], expected[1], "norm", TOLERANCE)
    for name, gradient in found[2].items():
        close(gradient, expected[2][name], name, TOLERANCE)
    shares = world.gather_objects(sorted(found[2]))
    copies = world.data_size if is_pipeline else len(shares)
    assert sorted(name for share in shares for name in share) == sorted([*expected[2]] * copies), (
        "every weight must belong to exactly one rank of each pipeline"
    )


def _compare_evaluation(plain: TextModel, layout: Layout, world: World) -> None:
    row = _rows(FEWER_ROWS)[world.data_rank]
    arguments = row.inputs_N, row.labels_N, row.positions_N, row.packing
    with torch.no_grad():
        expected, found = (model(*arguments, grad_calls=plain.config.num_calls) for model in (plain, layout.model))
    for ours, theirs, what in zip(found, expected, ("loss", "losses of the tokens", "right tokens"), strict=True):
        close(ours.float(), theirs.float(), what, TOLERANCE)
    assert isinstance(layout.model, TextModel)
    ours, theirs = (
        Decoder(model, PROMPTS, most_new_tokens=4, device=torch.device("cpu")) for model in (layout.model, plain)
    )
    found_BV, expected_BV = ours.read_prompts(), theirs.read_prompts()
    for _ in range(3):
        close(found_BV, expected_BV, "logits of the next token", TOLERANCE)
        for decoder in (ours, theirs):
            decoder.keep([2, 0] if len(expected_BV) == 3 else [0, 1])
        tokens_B = torch.tensor([3, 4])
        found_BV, expected_BV = ours.next_logits(tokens_B), theirs.next_logits(tokens_B)


def _check(world: World, config: ParallelConfig, num_parts: int, arch: type[TextConfig], options: Any) -> None:
    world = connect_devices(world, "cpu", DIST, axes=config.axes(world.size))
    plain = make_model(make_config(arch, **options))
    with torch.device("meta"):
        split = TextModel(plain.config, vocab_size=plain.vocab_size)
    layout = parallelize(split, config, world, num_microbatches=num_parts)
    layout.load(plain.state_dict().items())
    weights = whole_weights(layout, world)
    if world.is_main:
        assert weights.keys() == plain.state_dict().keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in plain.state_dict().items())
    held = [*plain.parameters(), *layout.model.parameters()]  # FSDP puts others in their place while it gathers
    _compare_evaluation(plain, layout, world)
    _compare_step(plain, layout, world, is_pipeline=config.name == "pipeline")
    with torch.no_grad():
        for weight in held:
            weight.mul_(1.1)
    layout.values_changed()
    _compare_evaluation(plain, layout, world)
    if arch is GPTConfig:
        _compare_step(plain, layout, world, is_pipeline=config.name == "pipeline")


def test_the_loss_of_a_row_of_a_pipeline_has_its_scale_and_adds_its_sums() -> None:
    model = make_model(make_config(GPTConfig))
    row, settings = _rows(NUM_ROWS)[0], model.config.num_calls
    batch, objective = TextBatch([row], 100), TextObjective(model)
    expected = objective.run(None, batch, settings)
    rank: Any = SimpleNamespace(model=model, objective=objective, _in_schedule=batch, _settings=settings)
    rank._loss_scale, rank._sums = 4.0, torch.ones_like(expected.sums)
    y_ND = model.hidden(row.inputs_N, row.positions_N, row.packing, settings)
    torch.testing.assert_close(TextPipelineLayout._loss(rank, y_ND, torch.tensor([0])), 4 * expected.loss)
    torch.testing.assert_close(rank._sums, 1 + expected.sums)


def _check_pipelines(world: World) -> None:
    if world.size == 4:
        for changes in ({"shard": 2}, {"stages": 2, "shard": 1}, {"shard": 2, "schedule": "interleaved"}):
            _check(world, config_of("pipeline", microbatches=2, **changes), 2, *STACKS[0])
        return
    for stack in STACKS:
        _check(world, config_of("pipeline", microbatches=8), 1, *stack)
    for schedule in ("gpipe", "interleaved"):
        _check(world, config_of("pipeline", microbatches=4, schedule=schedule), 2, *STACKS[0])


def _check_tensor_parallel(world: World) -> None:
    for arch, options in MODELS:
        config = config_of("tp")
        if world.size == 4 and options.get("num_kv_heads") == 2:
            with pytest.raises(UserError, match=r"4 ranks don't divide arch\.num_kv_heads 2; take one of 1, 2 "):
                config.require_support(make_model(make_config(arch, **options)), World(size=4))
        else:
            _check(world, config, FEWER_ROWS, arch, options)


def _check_sharded(world: World) -> None:
    config = config_of("fsdp_tp", tensor=2) if world.size == 4 else config_of("fsdp")
    for arch, options in MODELS:
        _check(world, config, FEWER_ROWS // 2, arch, options)


@pytest.mark.invariance
@pytest.mark.slow  # tests/test_parallel_text.py trains with every strategy
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("check", [_check_pipelines, _check_tensor_parallel, _check_sharded])
def test_text_under_every_strategy_computes_what_one_process_computes(
    num_ranks: int, check: Callable[[World], None]
) -> None:
    run_ranks(check, num_ranks)
