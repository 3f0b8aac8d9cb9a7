"""The YAML fits the published schemas, and its commands train, stop, restart and resume."""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import psutil
import pytest
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

from launch.kubernetes import MEETING_S, PORT, VOLUME, main, parse, render
from tests.runs import REPOSITORY, assert_same_run, latest, settings
from tests.spawn import free_port
from utils.ranks.launch import without_launcher

Manifest = dict[str, Any]
DATA = f"data_path={VOLUME}/data/sudoku"
STOPPED, MISTAKE = 75, 2


def _train_job_schema() -> Manifest:
    """Return the JSON schema of a TrainJob, which allows no unknown field and no null."""
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
        ("--nodes 4 --gpus 8", 8, {"cpu": "32", "memory": "128Gi", "nvidia.com/gpu": "8"}),
        ("--nodes 2 --gpus 0 --cpus 16 --memory 32Gi", 1, {"cpu": "16", "memory": "32Gi"}),
        ("--name a-run --namespace team --image host.example:5000/a:1 --volume-claim c", 1, None),
    ],
)
def test_the_manifests_fit_the_schemas(kind: str, typed: str, ranks: int, amounts: dict[str, str] | None) -> None:
    job = _rendered(typed, kind=kind)[-1]
    container = _container(job)
    if kind == "job":
        assert f"--nproc-per-node={ranks}" in container["args"]
    else:
        assert job["spec"]["trainer"]["numProcPerNode"] == ranks
    if amounts is not None:
        resources = container["resources" if kind == "job" else "resourcesPerNode"]
        assert resources == {"requests": amounts, "limits": amounts}
        assert container["image"] == ("trainer:cuda" if "nvidia.com/gpu" in amounts else "trainer:cpu")


def test_pods_meet_at_the_stable_name_of_the_first() -> None:
    service, job = _rendered("--nodes 4 --gpus 8 --name a-run")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"] == "a-run"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == PORT
    assert "--master-addr=a-run-0.a-run" in container["args"] and "--nnodes=4" in container["args"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_kubernetes_leaves_words_as_they_are_typed(kind: str) -> None:
    """Kubernetes replaces $(NAME) by a variable, and makes $ of $$."""
    typed = """--env NCCL_DEBUG=INFO --env OMP_NUM_THREADS=3 --env 'A=b=$(C)' "run_name='a$(HOSTNAME) b'" """
    container = _container(_rendered(typed, kind=kind)[-1])
    found = {variable["name"]: variable["value"] for variable in container["env"]}
    assert {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "A": "b=$$(C)"}.items() <= found.items()
    assert "run_name='a$$(HOSTNAME) b'" in container["args"] and "resume=auto" in container["args"]


def test_a_secret_is_not_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdefghijkl")
    assert main(["--env", "WANDB_API_KEY=abcdefghijkl", DATA]) == 2
    printed = capsys.readouterr()
    assert "WANDB_API_KEY" in printed.err and "abcdefghijkl" not in printed.out + printed.err


@pytest.mark.parametrize(("typed", "seconds"), [("", 1800), ("dist.start_timeout_s=4000.5", 4001)])
def test_pods_wait_for_one_another(typed: str, seconds: int) -> None:
    """torchrun meets before the ranks do, and its own patience is ten minutes."""
    assert f"--rdzv-conf=timeout={seconds}" in _container(_rendered(typed)[-1])["args"]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("--nodes 0", "--nodes is 0"),
        ("--name A", "--name is 'A'"),
        ("--env NCCL_DEBUG", "--env is 'NCCL_DEBUG'"),
        ("lr=-1", "lr"),
        ("data_path=data/sudoku", "data_path is data/sudoku"),
        ("checkpoint_path=checkpoints/a", "checkpoint_path is checkpoints/a"),
        ("data_path=/mnt/run/../data", "/mnt/run/../data"),
        ("load_checkpoint=/a", "load_checkpoint is /a"),
        ("experiment=my/own.yaml", "experiment=my/own.yaml"),
        ("--nodes 3 parallel=pipeline parallel.stages=2", "3 ranks"),
        ("resume=/mnt/run/a", "resume=/mnt/run/a"),
    ],
)
def test_a_wrong_argument_is_one_line(typed: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    own_data = [] if re.search("data_paths?=", typed) else [DATA]
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
        """Return a word as Kubernetes gives it to the pod."""
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


def _until(condition: Callable[[], bool], log: Path) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)


@pytest.fixture
def pods(data: Path, tmp_path: Path, log: Path) -> Iterator[tuple[_Pods, Path]]:
    run = tmp_path / "run"
    # Long enough to be struck. The tests end it by max_steps.
    found = _Pods(run, settings(data, None, max_steps=100_000, checkpoint_every_n_steps=20, keep_last_k=2), log)
    yield found, run
    found.kill()


@pytest.mark.launch
def test_an_eviction_of_one_pod_stops_all_with_a_checkpoint(pods: tuple[_Pods, Path], log: Path) -> None:
    """No pod may report success. Otherwise Kubernetes would not start it again."""
    both, run = pods
    both.start()
    _until(lambda: latest(run) > 0, log)
    before = latest(run)
    both.pods[1].send_signal(signal.SIGTERM)
    assert both.ended() == [STOPPED, STOPPED], log.read_text()
    assert latest(run) >= before and (run / "stopped").exists() and "resume=auto goes on from here" in log.read_text()


@pytest.mark.launch
def test_killed_and_evicted_pods_resume_to_the_quiet_end(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    both = _Pods(run, settings(data, None), log)
    try:
        both.start()
        _until(lambda: latest(run) > 0, log)
        (torchrun,) = [child for child in both.pods[1].children() if "torchrun" in " ".join(child.cmdline())]
        for process in [*torchrun.children(recursive=True), torchrun]:
            process.kill()
        first, second = both.ended()
        assert first not in (0, STOPPED) and second not in (0, STOPPED), log.read_text()
        both.start()
        assert both.ended() == [0, 0], log.read_text()
    finally:
        both.kill()
    assert_same_run(run, quiet_2)


@pytest.mark.launch
def test_an_old_marker_does_not_hide_a_failure(pods: tuple[_Pods, Path], log: Path) -> None:
    """A pod that starts alone never meets the other one. Nobody clears the marker, then."""
    both, run = pods
    run.mkdir()
    (run / "stopped").write_text("SIGTERM\n")
    both.words = [word.replace(f"timeout={MEETING_S}", "timeout=3") for word in both.words]
    for index in (0, 1):
        both.start((index,))
        assert both.ended() == [1], log.read_text()


@pytest.mark.launch
@pytest.mark.parametrize(("began", "status"), [(False, MISTAKE), (True, 1)])
def test_a_mistake_ends_the_job_before_the_first_checkpoint(
    tmp_path: Path, log: Path, *, began: bool, status: int
) -> None:
    """Later it may be a fault of the volume, which passes."""
    run = tmp_path / "run"
    if began:
        run.mkdir()
        (run / "latest").write_text("step_00000020\n")
    both = _Pods(run, [f"data_path={tmp_path}/none", "debug=tiny", "device=cpu"], log)
    try:
        both.start()
        assert status in both.ended(), log.read_text()
    finally:
        both.kill()
    assert log.read_text().count("error: ") >= 1
