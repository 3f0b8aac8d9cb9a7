"""Render a training run as YAML for Kubernetes: a Job, or a TrainJob of Kubeflow Trainer v2.

python -m launch.kubernetes --nodes 4 --gpus 8 data_path=/mnt/run/data/sudoku | kubectl apply -f -

Each node is a pod, in which torchrun starts a rank for each GPU. The pods meet at the pod with the
index 0. A pod that fails or is evicted is started again, and the run resumes from the newest
checkpoint on the volume, which all pods share.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from math import ceil
from posixpath import normpath
from typing import Any

import yaml

from training.config import PretrainConfig
from utils.arguments import Parser, check_at_least
from utils.command_line import read_config, validate
from utils.config_files import names_file
from utils.errors import UserError
from utils.overrides import as_override
from utils.programs import under_torchrun
from utils.secrets import secret_in
from utils.shell import run_command

Manifest = dict[str, Any]

VOLUME, PORT = "/mnt/run", 29500
# The exit status of a pod after a graceful stop, which has a checkpoint: try again (EX_TEMPFAIL).
STOPPED = 75
MISTAKE = 2  # the exit status after a mistake of the user: of no use to try again
# How long pods wait for one another at least. Images take their time to arrive.
MEETING_S = 1800
GRACE_S = 300  # for the rest of a step, its checkpoint and the upload of W&B
_USER = 1000  # the user of the Dockerfile
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 40  # Kubernetes adds the number of the pod and more, and a host name has 63 characters
_SET_HERE = ("MASTER_ADDR", "JOB_COMPLETION_INDEX")
_QUANTITY = re.compile(r"[1-9]\d*(Mi|Gi|Ti|M|G|T)")

_EXAMPLES = """
examples:
  python -m launch.kubernetes --nodes 4 --gpus 8 experiment=sudoku_extreme_1k data_path=/mnt/run/data/sudoku
  python -m launch.kubernetes --nodes 2 --gpus 0 --cpus 16 --memory 32Gi data_path=/mnt/run/data/sudoku
  python -m launch.kubernetes --kind trainjob --nodes 4 --gpus 8 data_path=/mnt/run/data/sudoku
"""

# bash gets the SIGTERM of an eviction, and passes it on to the ranks of its pod, if there are any
# yet. torchrun does not get it: the torchruns of the other pods would wait for it for five minutes.
# All ranks of all pods then save and end with status 0, which would mean that the work is done.
# Therefore a new marker of a graceful stop makes another status of it. A marker that was there
# before is of an earlier stop. `ls` reads the folder anew, also on NFS. A mistake is only taken for
# one as long as the run has no checkpoint: later it may be a fault of the volume, which passes.
# Backquotes, because Kubernetes replaces $(NAME) by a variable.
_SCRIPT = """\
marker() {{ ls -i --full-time {run} 2> /dev/null | grep ' stopped$'; }}
before=`marker`
trap 'ranks=`cat /proc/$!/task/*/children`; kill -TERM ${{ranks:-$!}}' TERM
{torchrun} &
while wait $!; status=$?; kill -0 $! 2> /dev/null; do :; done
after=`marker`
if [ "${{after:-$before}}" != "$before" ]; then exit {stopped}; fi
if [ $status = {mistake} ] && ls {run} 2> /dev/null | grep -qx latest; then exit 1; fi
exit $status
"""


@dataclass(frozen=True)
class Request:
    """What is to run, and on what."""

    kind: str
    name: str
    namespace: str
    image: str
    volume_claim: str
    nodes: int
    gpus: int
    cpus: int | None
    memory: str | None
    env: list[str]
    overrides: list[str]

    @property
    def ranks(self) -> int:
        """The ranks of a node: one for each GPU, or a single one with all cores."""
        return max(1, self.gpus)

    @property
    def cores(self) -> int:
        return self.cpus or 4 * self.ranks

    @property
    def resources(self) -> Manifest:
        """The resources of a pod.

        Requests are equal to limits, so that Kubernetes evicts other pods first.
        """
        amounts: Manifest = {"cpu": str(self.cores), "memory": self.memory or f"{16 * self.ranks}Gi"}
        if self.gpus:
            amounts["nvidia.com/gpu"] = str(self.gpus)
        return {"requests": amounts, "limits": dict(amounts)}


def parse(argv: list[str] | None) -> Request:
    """Read the command line.

    Raises:
        UserError: An option or an override is wrong.
    """
    parser = Parser("python -m launch.kubernetes", "Render a training run as YAML for Kubernetes.", _EXAMPLES)
    parser.add_argument("--kind", choices=["job", "trainjob"], default="job", help="job: an Indexed Job with a "
                        "headless Service; trainjob: a TrainJob of Kubeflow Trainer v2 (default: job)")  # fmt: skip
    parser.add_argument("--name", default="trainer", help="name of the job and of its run (default: trainer)")
    parser.add_argument("--namespace", default="default", help="namespace (default: default)")
    parser.add_argument("--image", help="image of the Dockerfile (default: trainer:cuda, or trainer:cpu without GPUs)")
    parser.add_argument("--volume-claim", default="trainer", metavar="CLAIM", help="PersistentVolumeClaim that all "
                        f"pods can write, mounted at {VOLUME} (default: trainer)")  # fmt: skip
    parser.add_argument("--nodes", type=int, default=1, help="number of pods (default: 1)")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of each pod, a rank each; 0: one rank on the CPU "
                        "(default: 1)")  # fmt: skip
    parser.add_argument("--cpus", type=int, help="cores of each pod (default: 4 for each rank)")
    parser.add_argument("--memory", help="memory of each pod, such as 64Gi (default: 16Gi for each rank)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the "
                        "pods, such as NCCL_DEBUG=INFO; can be repeated")  # fmt: skip
    parser.add_argument("overrides", nargs="*", help="keys of pretrain.py, as key=value")
    typed = parser.parse_args(argv)
    check_at_least(typed, nodes=1, gpus=0, cpus=1)
    typed.image = typed.image or ("trainer:cuda" if typed.gpus else "trainer:cpu")
    request = Request(**vars(typed))
    _check_names(request)
    _check_variables(request)
    return request


def _check_names(request: Request) -> None:
    if not _LABEL.fullmatch(request.name) or len(request.name) > _LONGEST_NAME:
        raise UserError(
            f"--name is {request.name!r}; give at most {_LONGEST_NAME} lower-case letters, digits and dashes that "
            "begin with a letter"
        )
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", request.namespace):
        raise UserError(f"--namespace is {request.namespace!r}; give lower-case letters, digits and dashes, at most 63")
    if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", request.volume_claim):
        raise UserError(f"--volume-claim is {request.volume_claim!r}; give lower-case letters, digits, dashes and dots")
    if request.memory is not None and not _QUANTITY.fullmatch(request.memory):
        raise UserError(f"--memory is {request.memory!r}; give a number with a unit, such as 64Gi")


def _check_variables(request: Request) -> None:
    for typed in request.env:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", typed, re.ASCII | re.DOTALL):
            raise UserError(f"--env is {typed!r}; give NAME=VALUE, such as NCCL_DEBUG=INFO")
        name = typed.partition("=")[0]
        if secret := secret_in(typed):
            raise UserError(f"--env {name} holds the secret {secret}; give it to the pods in a Secret of Kubernetes")
        if name in _SET_HERE:
            raise UserError(f"--env sets {name}, which pods need to meet; leave it out")


def overrides_of(request: Request) -> tuple[list[str], str, int]:
    """Return the overrides of the run, its folder, and how many seconds pods wait for one another.

    Raises:
        UserError: pretrain.py would refuse the overrides, or the pods would not find what they
            name.
    """
    for typed in request.overrides:
        if names_file(typed):
            raise UserError(
                f"{typed} names a file, which the pods don't have; put it into config/{typed.partition('=')[0]} "
                "before you build the image, and give its name there"
            )
    config = validate(PretrainConfig, read_config("pretrain", request.overrides))
    if config.resume not in (None, "auto"):
        raise UserError(f"resume={config.resume}: pods that start again need resume=auto, which is added; leave it out")
    config.parallel.axes(request.nodes * request.ranks)
    run = config.checkpoint_path or f"{VOLUME}/checkpoints/{request.name}"
    paths = [("checkpoint_path", run)]
    paths += [("data_paths" if config.data_paths else "data_path", path) for path in config.train_paths]
    paths += [("data_paths_test", path) for path in config.data_paths_test]
    paths += [(key, path) for key in ("init_from", "load_checkpoint") if (path := getattr(config, key))]
    for key, path in paths:
        if not normpath(path).startswith(f"{VOLUME}/"):
            raise UserError(f"{key} is {path}, which the pods don't share; give a path below {VOLUME}, the volume")
    added = [] if config.checkpoint_path else [f"checkpoint_path={as_override(run)}"]
    overrides = [*request.overrides, *added, *([] if config.resume else ["resume=auto"])]
    return overrides, run, max(MEETING_S, ceil(config.dist.start_timeout_s))


def script(request: Request) -> str:
    """Return the commands of a pod. Kubeflow Trainer gives torchrun its options in variables."""
    overrides, run, patience_s = overrides_of(request)
    words = ["python -m launch.torchrun", f"--rdzv-conf=timeout={patience_s}"]
    if request.kind == "job":
        words += [f"--nnodes={request.nodes}", f"--nproc-per-node={request.ranks}", f"--master-port={PORT}"]
        words += ['--node-rank="$JOB_COMPLETION_INDEX"', '--master-addr="$MASTER_ADDR"']
    # Kubernetes also makes $ of $$.
    typed = [shlex.quote(word).replace("$", "$$") for word in overrides]
    return _SCRIPT.format(
        torchrun=" ".join([*words, *under_torchrun("hrm-train"), *typed]),
        run=shlex.quote(run).replace("$", "$$"),
        stopped=STOPPED,
        mistake=MISTAKE,
    )


# ---- what Kubernetes gets ----------------------------------------------------------------------


def manifests(request: Request) -> list[Manifest]:
    """Return what is to be created, in this order."""
    return [_service(request), _job(request)] if request.kind == "job" else [_train_job(request)]


def _service(request: Request) -> Manifest:
    """Return the headless Service, which gives the pods stable names."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": request.name},
            "publishNotReadyAddresses": True,  # pods that wait for one another are not ready
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _job(request: Request) -> Manifest:
    container = {
        "name": "trainer",
        "image": request.image,
        "command": ["bash", "-c", script(request)],
        "env": [*_environment(request), {"name": "MASTER_ADDR", "value": f"{request.name}-0.{request.name}"}],
        "ports": [{"name": "rendezvous", "containerPort": PORT}],
        "resources": request.resources,
        "securityContext": _container_security(),
        "volumeMounts": _mounts(),
    }
    pod = {
        "restartPolicy": "Never",
        "subdomain": request.name,
        **_pod_settings(request),
        "containers": [container],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(request),
        "spec": {
            "completionMode": "Indexed",
            "completions": request.nodes,
            "parallelism": request.nodes,
            # A fault ends all pods, and each counts. Three faults are tolerated.
            "backoffLimit": 3 * request.nodes,
            "podFailurePolicy": {
                "rules": [  # the first that fits; what is ignored does not count
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "Ignore", "onExitCodes": _status(STOPPED)},
                    {"action": "FailJob", "onExitCodes": _status(MISTAKE)},
                ]
            },
            # Rank 0 ends as the last one. A pod that is evicted after that must not start again,
            # alone.
            "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
            "template": {"spec": pod},
        },
    }


def _status(status: int) -> Manifest:
    return {"containerName": "trainer", "operator": "In", "values": [status]}


def _train_job(request: Request) -> Manifest:
    pod = {
        **_pod_settings(request),
        "containers": [{"name": "node", "securityContext": _container_security(), "volumeMounts": _mounts()}],
    }
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(request),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": request.image,
                "command": ["bash", "-c", script(request)],
                "env": _environment(request),
                "numNodes": request.nodes,
                "numProcPerNode": request.ranks,
                "resourcesPerNode": request.resources,
            },
            "runtimePatches": [
                {
                    "manager": "trainer/launch.kubernetes",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
                }
            ],
        },
    }


def _metadata(request: Request) -> Manifest:
    return {"name": request.name, "namespace": request.namespace, "labels": {"app.kubernetes.io/name": request.name}}


def _environment(request: Request) -> list[Manifest]:
    variables = {"OMP_NUM_THREADS": str(max(1, request.cores // request.ranks))}
    for typed in request.env:
        name, _, value = typed.partition("=")
        variables[name] = value.replace("$", "$$")  # Kubernetes also makes $ of $$
    return [{"name": name, "value": value} for name, value in variables.items()]


def _pod_settings(request: Request) -> Manifest:
    # NCCL needs more shared memory than the 64 MB of a container. It counts as the pod's memory.
    memory = {"medium": "Memory", "sizeLimit": f"{request.ranks}Gi"}
    return {
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "fsGroupChangePolicy": "OnRootMismatch",  # a volume of many files is not walked at each start
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": request.volume_claim}},
            {"name": "shared-memory", "emptyDir": memory},
        ],
    }


def _container_security() -> Manifest:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _mounts() -> list[Manifest]:
    return [{"name": "run", "mountPath": VOLUME}, {"name": "shared-memory", "mountPath": "/dev/shm"}]


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def render(request: Request) -> str:
    """Return the YAML."""
    return yaml.dump_all(manifests(request), Dumper=_Dumper, sort_keys=False, width=10**6, explicit_start=True)


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda typed: render(parse(typed)).rstrip(), argv)


if __name__ == "__main__":
    sys.exit(main())
