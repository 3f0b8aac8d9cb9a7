"""Render a training run as YAML for Kubernetes: a Job, or a TrainJob of Kubeflow Trainer v2.

python -m launch.kubernetes --nodes 4 --gpus 8 data_path=/mnt/run/data/sudoku | kubectl apply -f -

Each node is a pod, in which torchrun starts a rank for each GPU. The pods meet at the pod with the
index 0. A pod that fails or is evicted is started again, and the run resumes from the newest
checkpoint on the volume, which all pods share. job.yaml and trainjob.yaml beside this file are the
templates, and pod.sh is what a pod runs.
"""

import json
import re
import sys
from argparse import Namespace
from math import ceil
from pathlib import Path
from posixpath import normpath
from string import Template
from textwrap import indent

from training.config import PretrainConfig
from utils.arguments import Parser, check_at_least
from utils.command_line import read_config, validate
from utils.config_files import names_file
from utils.errors import UserError
from utils.overrides import as_override
from utils.programs import under_torchrun
from utils.secrets import secret_in
from utils.shell import run_command

VOLUME, PORT = "/mnt/run", 29500
# How long pods wait for one another at least. Images take their time to arrive.
MEETING_S = 1800
_TEMPLATES = Path(__file__).resolve().parent
# Kubernetes adds the number of the pod and more, and a host name has 63 characters.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")

_EXAMPLES = """
examples:
  python -m launch.kubernetes --nodes 4 --gpus 8 experiment=sudoku_extreme_1k data_path=/mnt/run/data/sudoku
  python -m launch.kubernetes --nodes 2 --gpus 0 --cpus 16 --memory 32Gi data_path=/mnt/run/data/sudoku
  python -m launch.kubernetes --kind trainjob --nodes 4 --gpus 8 data_path=/mnt/run/data/sudoku
"""


class _Manifest(Template):
    """A template whose placeholders are %names, because the script has dollars."""

    delimiter = "%"


def parse(argv: list[str] | None) -> Namespace:
    parser = Parser("python -m launch.kubernetes", "Render a training run as YAML for Kubernetes.", _EXAMPLES)
    add = parser.add_argument
    add("--kind", choices=["job", "trainjob"], default="job", help="job: an Indexed Job with a headless Service; "
        "trainjob: a TrainJob of Kubeflow Trainer v2 (default: job)")  # fmt: skip
    add("--name", default="trainer", help="name of the job and of its run (default: trainer)")
    add("--namespace", default="default", help="namespace (default: default)")
    add("--image", help="image of the Dockerfile (default: trainer:cuda, or trainer:cpu without GPUs)")
    add("--volume-claim", default="trainer", metavar="CLAIM", help="PersistentVolumeClaim that all pods can write, "
        f"mounted at {VOLUME} (default: trainer)")  # fmt: skip
    add("--nodes", type=int, default=1, help="number of pods (default: 1)")
    add("--gpus", type=int, default=1, help="GPUs of each pod, a rank each; 0: one rank on the CPU (default: 1)")
    add("--cpus", type=int, help="cores of each pod (default: 4 for each rank)")
    add("--memory", help="memory of each pod, such as 64Gi (default: 16Gi for each rank)")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the pods, such as "
        "NCCL_DEBUG=INFO; can be repeated")  # fmt: skip
    add("overrides", nargs="*", help="keys of pretrain.py, as key=value")
    typed = parser.parse_args(argv)
    check_at_least(typed, nodes=1, gpus=0, cpus=1)
    if not _NAME.fullmatch(typed.name):
        raise UserError(
            f"--name is {typed.name!r}; give at most 40 lower-case letters, digits and dashes that begin with a letter"
        )
    for variable in typed.env:
        if variable.find("=") < 1:
            raise UserError(f"--env is {variable!r}; give NAME=VALUE, such as NCCL_DEBUG=INFO")
        if secret := secret_in(variable):
            raise UserError(f"--env holds the secret {secret}; give it to the pods in a Secret of Kubernetes")
    return typed


def overrides_of(typed: Namespace, num_ranks: int) -> tuple[list[str], str, int]:
    """Return the overrides, the folder of the run, and how long pods wait for one another."""
    for word in typed.overrides:
        if names_file(word):
            raise UserError(
                f"{word} names a file, which the pods don't have; put it into config/{word.partition('=')[0]} before "
                "you build the image, and give its name there"
            )
    config = validate(PretrainConfig, read_config("pretrain", typed.overrides))
    if config.resume not in (None, "auto"):
        raise UserError(f"resume={config.resume}: pods that start again need resume=auto, which is added; leave it out")
    config.parallel.axes(num_ranks)
    run = config.checkpoint_path or f"{VOLUME}/checkpoints/{typed.name}"
    paths = [("checkpoint_path", run)]
    paths += [("data_paths" if config.data_paths else "data_path", path) for path in config.train_paths]
    paths += [("data_paths_test", path) for path in config.data_paths_test]
    paths += [(key, path) for key in ("init_from", "load_checkpoint") if (path := getattr(config, key))]
    for key, path in paths:
        if not normpath(path).startswith(f"{VOLUME}/"):
            raise UserError(f"{key} is {path}, which the pods don't share; give a path below {VOLUME}, the volume")
    added = [] if config.checkpoint_path else [f"checkpoint_path={as_override(run)}"]
    overrides = [*typed.overrides, *added, *([] if config.resume else ["resume=auto"])]
    return overrides, run, max(MEETING_S, ceil(config.dist.start_timeout_s))


def render(typed: Namespace) -> str:
    """Return the YAML. Its values are JSON, which YAML reads as such."""
    ranks = max(1, typed.gpus)  # without GPUs, a single rank has all cores
    cores = typed.cpus or 4 * ranks
    overrides, run, patience_s = overrides_of(typed, typed.nodes * ranks)
    torchrun = [f"--rdzv-conf=timeout={patience_s}"]
    variables = {"OMP_NUM_THREADS": str(max(1, cores // ranks))}
    variables |= dict(word.split("=", 1) for word in typed.env) | {"RUN": run}
    if typed.kind == "job":
        torchrun += [f"--nnodes={typed.nodes}", f"--nproc-per-node={ranks}", f"--master-port={PORT}"]
        torchrun += ["--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={typed.name}-0.{typed.name}"]
    # Kubernetes replaces $(NAME) by a variable, and makes $ of $$.
    program = [word.replace("$", "$$") for word in [*under_torchrun("pretrain"), *overrides]]
    # Requests are equal to limits, so that Kubernetes evicts other pods first.
    amounts = {"cpu": str(cores), "memory": typed.memory or f"{16 * ranks}Gi"}
    amounts |= {"nvidia.com/gpu": str(typed.gpus)} if typed.gpus else {}
    values = {
        "name": typed.name,
        "namespace": typed.namespace,
        "image": typed.image or ("trainer:cuda" if typed.gpus else "trainer:cpu"),
        "claim": typed.volume_claim,
        "nodes": typed.nodes,
        "ranks": ranks,
        "failures": 3 * typed.nodes,
        "shared_memory": f"{ranks}Gi",
        "arguments": ["pod", *torchrun, *program],
        "environment": [{"name": name, "value": value.replace("$", "$$")} for name, value in variables.items()],
        "resources": {"requests": amounts, "limits": amounts},
    }
    script = (_TEMPLATES / "pod.sh").read_text(encoding="utf-8")
    template = _Manifest((_TEMPLATES / f"{typed.kind}.yaml").read_text(encoding="utf-8"))
    filled = {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
    return template.substitute(filled, script=indent(script, " " * 14)).rstrip()


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda typed: render(parse(typed)), argv)


if __name__ == "__main__":
    sys.exit(main())
