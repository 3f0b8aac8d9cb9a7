"""The YAML fits the published schemas, and its commands train, stop, restart and resume."""

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import psutil
import pytest
import yaml

from launch.kubernetes import MEETING_S, PORT, VOLUME, main, parse, render
from tests.runs import REPOSITORY, assert_same_run, latest, settings, until
from tests.spawn import free_port
from utils.ranks.launch import without_launcher

Manifest = dict[str, Any]
DATA = f"data_path={VOLUME}/data/sudoku"
STOPPED, MISTAKE = 75, 2


def _train_job_schema() -> Manifest:
    """Return the JSON schema of a TrainJob, which allows no unknown field and no null."""
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob  # takes a second

    schema = TrainerV1alpha1TrainJob.model_json_schema(by_alias=True)
    # The package has no schema of a quantity, which is a number with a unit.
    quantity = {"type": ["string", "number"], "pattern": r"^[0-9.]+([KMGTPE]i?|k|m)?$"}
    schema["$defs"]["IoK8sApimachineryPkgApiResourceQuantity"] = quantity
    for part in (schema, *schema["$defs"].values()):
        if "properties" in part:
            part["additionalProperties"] = False
    return schema


def _rendered(typed: str, *, kind: str = "job") -> list[Manifest]:
    """Return the manifests. The published schemas refuse unknown fields and wrong values."""
    found = list(yaml.safe_load_all(render(parse(["--kind", kind, *shlex.split(typed), DATA]))))
    for manifest in found:
        if manifest["kind"] == "TrainJob":
            jsonschema.Draft202012Validator(_train_job_schema()).validate(manifest)
        else:
            for version in ("1.31", "1.37"):
                kubernetes_validate.validate(manifest, version, strict=True)
    return found


def _container(manifest: Manifest) -> Manifest:
    if manifest["kind"] == "TrainJob":
        found: Manifest = manifest["spec"]["trainer"]
    else:
        (found,) = manifest["spec"]["template"]["spec"]["containers"]
    return found


@pytest.mark.parametrize("kind", ["job", "trainjob"])
@pytest.mark.parametrize(
    ("typed", "ranks", "amounts"),
    [
        ("--nodes 4 --gpus 8 --cpus 24", 8, {"cpu": "24", "memory": "128Gi", "nvidia.com/gpu": "8"}),
        ("--nodes 2 --gpus 0 --cpus 16 --memory 32Gi", 1, {"cpu": "16", "memory": "32Gi"}),
    ],
)
def test_the_manifests_hold_what_is_typed(kind: str, typed: str, ranks: int, amounts: dict[str, str]) -> None:
    job = _rendered(f"{typed} --name a-run --namespace team --volume-claim c", kind=kind)[-1]
    container, metadata, nodes = _container(job), job["metadata"], int(typed.split()[1])
    own = [f"backoffLimit: {3 * nodes}", "restartPolicy: Never"]
    if kind == "job":
        assert f"--nproc-per-node={ranks}" in container["args"]
    else:
        assert job["spec"]["trainer"]["numProcPerNode"] == ranks
        own = [f"numNodes: {nodes}"]
    resources = container["resources" if kind == "job" else "resourcesPerNode"]
    assert resources == {"requests": amounts, "limits": amounts}
    assert container["image"] == ("trainer:cuda" if "nvidia.com/gpu" in amounts else "trainer:cpu")
    variables = {"OMP_NUM_THREADS": str(int(amounts["cpu"]) // ranks), "RUN": f"{VOLUME}/checkpoints/a-run"}
    assert container["env"] == [{"name": name, "value": value} for name, value in variables.items()]
    assert f"checkpoint_path={variables['RUN']}" in container["args"]
    assert (metadata["name"], metadata["namespace"]) == ("a-run", "team")
    for line in ("claimName: c", f"sizeLimit: {ranks}Gi", f"mountPath: {VOLUME}", *own):
        assert f"{line}\n" in yaml.safe_dump(job)


def test_pods_meet_at_the_stable_name_of_the_first() -> None:
    """torchrun meets before the ranks do, and its own patience is ten minutes."""
    service, job = _rendered("--nodes 4 --gpus 8 --name a-run")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"] == "a-run"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == PORT
    assert "--master-addr=a-run-0.a-run" in container["args"] and "--nnodes=4" in container["args"]
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule.get("onExitCodes", {}).get("values") for rule in rules] == [None, [STOPPED], [MISTAKE]]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4
    for typed, seconds in (("", 1800), ("dist.start_timeout_s=4000.5", 4001)):
        assert f"--rdzv-conf=timeout={seconds}" in _container(_rendered(typed)[-1])["args"]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_kubernetes_leaves_words_as_they_are_typed(kind: str) -> None:
    """Kubernetes replaces $(NAME) by a variable, and makes $ of $$."""
    typed = """--env NCCL_DEBUG=INFO --env OMP_NUM_THREADS=3 --env 'A=b=$(C)' "run_name='a$(HOSTNAME) b'" """
    container = _container(_rendered(f"--image host:5000/a:1 {typed}", kind=kind)[-1])
    found = {variable["name"]: variable["value"] for variable in container["env"]}
    assert {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "A": "b=$$(C)"}.items() <= found.items()
    assert container["image"] == "host:5000/a:1"
    assert "run_name='a$$(HOSTNAME) b'" in container["args"] and "resume=auto" in container["args"]


def test_a_secret_is_not_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdefghijkl")
    assert main(["--env", "WANDB_API_KEY=abcdefghijkl", DATA]) == 2
    printed = capsys.readouterr()
    assert "WANDB_API_KEY" in printed.err and "abcdefghijkl" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("--name A", "--name is 'A'"),
        ("lr=-1", "lr"),
        ("data_path=data/sudoku", "data_path is data/sudoku"),
        ("data_path=/mnt/run/../data", "/mnt/run/../data"),
        ("load_checkpoint=/a", "load_checkpoint is /a"),
        ("init_from=/a", "init_from is /a"),
        ("checkpoint_path=/a", "checkpoint_path is /a"),
        ("data_path=null data_paths=[/mnt/run/a,data/4]", "data_paths is data/4"),
        ("data_paths_test=[data/4]", "data_paths_test is data/4"),
        ("experiment=my/own.yaml", "experiment=my/own.yaml"),
        ("--nodes 3 parallel=pipeline parallel.stages=2", "3 ranks"),
        ("resume=/mnt/run/a", "resume=/mnt/run/a"),
    ],
)
def test_a_wrong_argument_is_one_line(typed: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    own_data = [] if "data_path=" in typed else [DATA]
    assert main([*typed.split(), *own_data]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and named in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


# ---- the commands, run here --------------------------------------------------------------------


class _Pods:
    """Two pods on this host: their commands under bash, as the first process of a session each."""

    def __init__(self, run: Path, overrides: list[str], log: Path) -> None:
        container = _container(_rendered("--nodes 2 --gpus 0")[-1])
        words = [word.replace(f"={PORT}", f"={free_port()}") for word in container["args"]]
        words = words[: words.index("pretrain.py") + 1]
        self.words = [*container["command"], *words, *overrides, f"checkpoint_path={run}", "resume=auto"]
        self.run, self.log, self.pods = run, log, list[psutil.Popen]()

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def alive(self) -> bool:
        return any(pod.is_running() for pod in self.pods)

    def start(self, indices: tuple[int, ...] = (0, 1)) -> None:
        environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", "RUN": str(self.run)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.log.open("a") as log:
            self.pods = [
                psutil.Popen(
                    [self._expanded(word, index) for word in self.words],
                    cwd=REPOSITORY,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for index in indices
            ]

    @staticmethod
    def _expanded(word: str, index: int) -> str:
        named = word.replace("trainer-0.trainer", "127.0.0.1")
        return named.replace("$(JOB_COMPLETION_INDEX)", str(index))

    def ended(self) -> list[int]:
        return [pod.wait(timeout=180) for pod in self.pods]

    def kill(self) -> None:
        for pod in self.pods:
            if pod.is_running():
                for process in [*pod.children(recursive=True), pod]:
                    process.kill()
                pod.wait()


@pytest.fixture
def pods(data: Path, tmp_path: Path, log: Path) -> Iterator[_Pods]:
    # Long enough to be struck. The tests end it by max_steps.
    typed = settings(data, None, max_steps=100_000, checkpoint_every_n_steps=20, keep_last_k=2)
    found = _Pods(tmp_path / "run", typed, log)
    yield found
    found.kill()


@pytest.mark.slow
@pytest.mark.launch
def test_an_eviction_of_one_pod_stops_all_with_a_checkpoint(pods: _Pods, log: Path) -> None:
    """No pod may report success. Otherwise Kubernetes would not start it again."""
    pods.start()
    until(lambda: latest(pods.run) > 0, pods)
    before = latest(pods.run)
    pods.pods[1].send_signal(signal.SIGTERM)
    assert pods.ended() == [STOPPED, STOPPED], pods.output
    assert latest(pods.run) >= before and (pods.run / "stopped").exists()
    assert "resume=auto goes on from here" in pods.output


@pytest.mark.slow
@pytest.mark.launch
def test_killed_pods_resume_to_the_quiet_end(data: Path, quiet_2: Path, pods: _Pods) -> None:
    short = [*settings(data, None), f"checkpoint_path={pods.run}", "resume=auto"]
    pods.words = [*pods.words[: pods.words.index("pretrain.py") + 1], *short]
    pods.start()
    until(lambda: latest(pods.run) > 0, pods)
    (torchrun,) = [child for child in pods.pods[1].children() if "torchrun" in " ".join(child.cmdline())]
    for process in [*torchrun.children(recursive=True), torchrun]:
        process.kill()
    first, second = pods.ended()
    assert first not in (0, STOPPED) and second not in (0, STOPPED), pods.output
    pods.start()
    assert pods.ended() == [0, 0], pods.output
    assert_same_run(pods.run, quiet_2)


@pytest.mark.launch
def test_an_old_marker_does_not_hide_a_failure(pods: _Pods) -> None:
    """A pod that starts alone never meets the other one. Nobody clears the marker, then."""
    pods.run.mkdir()
    (pods.run / "stopped").write_text("SIGTERM\n")
    pods.words = [word.replace(f"timeout={MEETING_S}", "timeout=3") for word in pods.words]
    for index in (0, 1):
        pods.start((index,))
        assert pods.ended() == [1], pods.output


@pytest.mark.launch
@pytest.mark.parametrize(("began", "status"), [(False, MISTAKE), pytest.param(True, 1, marks=pytest.mark.slow)])
def test_a_mistake_ends_the_job_before_the_first_checkpoint(
    pods: _Pods, tmp_path: Path, *, began: bool, status: int
) -> None:
    """Later it may be a fault of the volume, which passes."""
    (tmp_path / "rank.py").write_text("print('error: a mistake')\nraise SystemExit(2)\n")
    pods.words[pods.words.index("pretrain.py")] = str(tmp_path / "rank.py")
    if began:
        pods.run.mkdir()
        (pods.run / "latest").write_text("step_00000020\n")
    pods.start()
    assert status in pods.ended(), pods.output
    assert pods.output.count("error: ") >= 1
