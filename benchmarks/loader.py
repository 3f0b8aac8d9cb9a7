"""Measure what share of a step the training loop waits for data and prepares them.

python -m benchmarks.loader --step-ms MS [--steps 100] [--rounds 5] OVERRIDE...
e.g. python -m benchmarks.loader --step-ms 60 experiment=sudoku_extreme_1k device=cpu

Instead of training, the loop sleeps --step-ms after each batch, as it would wait for a GPU. The
loader's thread reads meanwhile. So the share for a fast step can be measured without the machine
that is so fast. Data on the host, data on the device (data_on) and online augmentation are measured
in turn. The time of the loop's thread on the CPU is what stays if no other work delays the threads;
on a CPU it includes what a GPU would do.
"""

import statistics
import time
from collections.abc import Iterator

from benchmarks.harness import parser_of, spread, table
from dataset.loader import DataOn, TrainLoader
from dataset.online import OnlineAugmentation
from dataset.sampler import Sampler
from pretrain import open_run
from training.config import PretrainConfig
from training.plan import Plan, online_augmentation
from training.resume import Start
from utils.batch import Batch
from utils.checkpoint.format import Progress
from utils.command_line import read_config, validate
from utils.ranks.setup import join_ranks


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--step-ms", type=float, required=True, help="what a step of the model takes")
    parser.add_argument("--steps", type=int, default=100, help="steps of a round (default: 100)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_intermixed_args()

    start = Start(validate(PretrainConfig, read_config("pretrain", args.overrides)))
    world, data = open_run(start, join_ranks())
    plan = Plan.make(start.config, data, Progress(), world)
    online = online_augmentation(start.config.model_copy(update={"augment": "online"}), data, world)

    def batches(data_on: DataOn, augmentation: OnlineAugmentation | None) -> Iterator[Batch]:
        assert isinstance(plan.sampler, Sampler)
        loader = TrainLoader(data.puzzles("train"), plan.sampler, world, augmentation=augmentation, data_on=data_on)
        return iter(loader.batches(range(1, plan.last_step + 1)))

    kinds = {
        "on the host": batches("host", None),
        "on the device": batches("device", None),
        "on the host, augmented": batches("host", online),
        "on the device, augmented": batches("device", online),
    }
    ms: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind, arriving in kinds.items():
            wall = cpu = 0.0
            for _ in range(args.steps):
                began, cpu_began = time.perf_counter(), time.thread_time()
                next(arriving)
                world.wait_for_device()
                wall += time.perf_counter() - began
                cpu += time.thread_time() - cpu_began
                time.sleep(args.step_ms / 1e3)
            ms[kind].append((1e3 * wall / args.steps, 1e3 * cpu / args.steps))
    print(f"batches of {start.config.global_batch_size} on {world.device}, a step of {args.step_ms:g} ms\n")
    rows, show = [], "{:.3f}".format
    for kind, rounds in ms.items():
        walls, cpus = zip(*rounds, strict=True)
        share = statistics.median(walls) / (statistics.median(walls) + args.step_ms)
        rows.append([kind, spread(walls, show), f"{share:.2%}", spread(cpus, show)])
    print(table(["data", "ms a step", "share of the step", "of it on the CPU, ms"], rows))


if __name__ == "__main__":
    main()
