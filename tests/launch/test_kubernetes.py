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

from launch import kubernetes
from launch.kubernetes import GRACE_S, MEETING_S, MISTAKE, PORT, STOPPED, VOLUME, main, manifests, parse, render
from tests.runs import REPOSITORY, assert_same_run, latest, settings
from tests.spawn import free_port
from utils.errors import UserError
from utils.ranks.launch import without_launcher

Manifest = dict[str, Any]
DATA = f"data_path={VOLUME}/data/sudoku"
VARIATIONS = {
    "the issue's": "--nodes 4 --gpus 8",
    "one pod": "",
    "on CPUs": "--nodes 2 --gpus 0 --cpus 16 --memory 32Gi",
    "all options": "--name a-run --namespace team --image host.example:5000/a/trainer:1 --volume-claim c --gpus 2",
}


# ---- the published schemas ---------------------------------------------------------------------


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


def _check(manifest: Manifest, version: str = "1.37") -> None:
    if manifest["kind"] == "TrainJob":
        jsonschema.Draft202012Validator(_train_job_schema()).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def _rendered(typed: str, *, kind: str = "job") -> list[Manifest]:
    return list(yaml.safe_load_all(render(parse([*shlex.split(typed), "--kind", kind, DATA]))))


@pytest.mark.parametrize("version", ["1.31", "1.37"])
@pytest.mark.parametrize("typed", VARIATIONS.values(), ids=VARIATIONS)
def test_a_job_fits_the_schemas_of_kubernetes(typed: str, version: str) -> None:
    found = _rendered(typed)
    assert [manifest["kind"] for manifest in found] == ["Service", "Job"]
    for manifest in found:
        _check(manifest, version)


@pytest.mark.parametrize("typed", VARIATIONS.values(), ids=VARIATIONS)
def test_a_train_job_fits_the_schema_of_kubeflow(typed: str) -> None:
    (found,) = _rendered(typed, kind="trainjob")
    _check(found)


def _objects(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every object inside a manifest."""
    if isinstance(value, dict):
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _objects(child, (*path, key))


MAPS = {"labels", "requests", "limits", "selector"}  # they may have any key


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_the_schemas_refuse_an_unknown_field_anywhere(kind: str) -> None:
    planted = 0
    for number, manifest in enumerate(_rendered("--nodes 4 --gpus 8", kind=kind)):
        for path in _objects(manifest):
            wrong = _rendered("--nodes 4 --gpus 8", kind=kind)[number]
            place: Any = wrong
            for key in path:
                place = place[key]
            if path and path[-1] in MAPS:
                place["a"] = {}  # not a text
            else:
                place["numProcsPerNode"] = 8
            with pytest.raises(jsonschema.ValidationError):
                _check(wrong)
            planted += 1
    assert planted > 15


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("job", ("spec", "completions"), "four"),
        ("job", ("spec", "podFailurePolicy", "rules", 0, "action"), None),
        ("trainjob", ("spec", "trainer", "numProcPerNode"), "auto"),
        ("trainjob", ("spec", "trainer", "resourcesPerNode", "limits", "memory"), "much"),
        ("trainjob", ("spec", "runtimeRef"), {}),
    ],
)
def test_the_schemas_refuse_wrong_values(kind: str, path: tuple[str | int, ...], value: Any) -> None:
    wrong = _rendered("", kind=kind)[-1]
    place: Any = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        _check(wrong)


# ---- what a cluster makes of it ----------------------------------------------------------------


def test_pods_meet_at_the_stable_name_of_the_first() -> None:
    service, job = _rendered("--nodes 4 --gpus 8 --name a-run")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"] == "a-run"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["ports"][0]["port"] == container["ports"][0]["containerPort"] == PORT
    assert {"name": "MASTER_ADDR", "value": "a-run-0.a-run"} in container["env"]
    assert "--nnodes=4 --nproc-per-node=8" in container["command"][-1]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 4


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_a_pod_is_small_and_has_time(kind: str) -> None:
    job = _rendered("--nodes 2 --gpus 4 --cpus 12 --memory 64Gi", kind=kind)[-1]
    if kind == "job":
        pod = job["spec"]["template"]["spec"]
        resources, mounts = pod["containers"][0]["resources"], pod["containers"][0]["volumeMounts"]
    else:
        (patch,) = job["spec"]["runtimePatches"]
        (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = node["template"]["spec"]["template"]["spec"]
        resources, mounts = job["spec"]["trainer"]["resourcesPerNode"], pod["containers"][0]["volumeMounts"]
        assert job["spec"]["trainer"]["numProcPerNode"] == 4
    assert resources["requests"] == resources["limits"] == {"cpu": "12", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert {mount["mountPath"] for mount in mounts} == {VOLUME, "/dev/shm"}
    assert {mount["name"] for mount in mounts} == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    assert pod["terminationGracePeriodSeconds"] == GRACE_S


def test_a_graceful_stop_does_not_count_as_a_failure() -> None:
    _, job = _rendered("--nodes 4")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert {"containerName": "trainer", "operator": "In", "values": [STOPPED]} in [r.get("onExitCodes") for r in rules]
    actions = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in rules if "onExitCodes" in rule}
    assert actions == {STOPPED: "Ignore", MISTAKE: "FailJob"} and job["spec"]["backoffLimit"] >= 4


def test_a_job_is_done_when_rank_0_is() -> None:
    """A pod that is evicted afterwards would start again, and wait for the others in vain."""
    _, job = _rendered("--nodes 4")
    assert job["spec"]["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_variables_reach_the_pods(kind: str) -> None:
    job = _rendered("--gpus 2 --env NCCL_DEBUG=INFO --env OMP_NUM_THREADS=3 --env 'A=b=$(C)'", kind=kind)[-1]
    spec = job["spec"]["template"]["spec"]["containers"][0] if kind == "job" else job["spec"]["trainer"]
    expected = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "3", "A": "b=$$(C)"}
    found = [(variable["name"], variable["value"]) for variable in spec["env"]]
    assert expected.items() <= dict(found).items() and len(found) == len(dict(found))
    _check(job)


def test_a_secret_is_not_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abcdefghijkl")
    assert main(["--env", "WANDB_API_KEY=abcdefghijkl", DATA]) == 2
    printed = capsys.readouterr()
    assert "holds the secret WANDB_API_KEY; give it to the pods in a Secret" in printed.err
    assert "abcdefghijkl" not in printed.out + printed.err


@pytest.mark.parametrize(("typed", "seconds"), [("", 1800), ("dist.start_timeout_s=4000.5", 4001)])
@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_pods_wait_for_one_another(kind: str, typed: str, seconds: int) -> None:
    """torchrun meets before the ranks do, and its own patience is ten minutes."""
    request = parse(["--kind", kind, DATA, *typed.split()])
    assert f" --rdzv-conf=timeout={seconds} " in kubernetes.script(request)


def _torchrun(request: kubernetes.Request) -> str:
    """Return the line of the script that starts torchrun."""
    (line,) = [line for line in kubernetes.script(request).splitlines() if " pretrain.py " in line]
    return line


def test_kubernetes_leaves_an_override_as_it_is_typed() -> None:
    """Kubernetes replaces $(NAME) in a command by a variable, and makes $ of $$."""
    typed = ["run_name='a$(HOSTNAME)b'", "project_name='two words'"]
    request = parse([DATA, *typed])
    words = shlex.split(_torchrun(request).replace("$$", "$"))
    assert set(typed) <= set(words)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--nodes 0", "--nodes is 0; it must be at least 1"),
        ("--gpus -1", "--gpus is -1; it must be at least 0"),
        ("--nodes two", "argument --nodes: invalid int value: 'two'"),
        ("--kind pytorchjob", "argument --kind: invalid choice: 'pytorchjob'"),
        ("--name A", "--name is 'A'; give at most 40 lower-case letters"),
        ("--name a" + 40 * "b", "give at most 40 lower-case letters"),
        ("--volume-claim a/b", "--volume-claim is 'a/b'; give lower-case letters"),
        ("--namespace a.b", "--namespace is 'a.b'; give lower-case letters, digits and dashes"),
        ("--memory 64", "--memory is '64'; give a number with a unit, such as 64Gi"),
        ("--memory 64GB", "--memory is '64GB'; give a number with a unit, such as 64Gi"),
        ("--env NCCL_DEBUG", "--env is 'NCCL_DEBUG'; give NAME=VALUE"),
        ("--env MASTER_ADDR=a", "--env sets MASTER_ADDR, which pods need to meet"),
        ("epoch=3", "unknown key 'epoch'; did you mean epochs"),
        ("data_path=data/sudoku", "data_path is data/sudoku, which the pods don't share; give a path below /mnt/run"),
        ("checkpoint_path=checkpoints/a", "checkpoint_path is checkpoints/a, which the pods don't share"),
        ("data_path=/mnt/run/../data", "data_path is /mnt/run/../data, which the pods don't share"),
        ("data_paths=[/mnt/run/a,b]", "data_paths is b, which the pods don't share"),
        ("data_paths_test=[/data/test]", "data_paths_test is /data/test, which the pods don't share"),
        ("init_from=checkpoints/a", "init_from is checkpoints/a, which the pods don't share"),
        ("load_checkpoint=/a", "load_checkpoint is /a, which the pods don't share"),
        (
            "experiment=my/own.yaml",
            "experiment=my/own.yaml names a file, which the pods don't have; put it",
        ),
        ("--nodes 3 parallel=pipeline parallel.stages=2", "doesn't divide 3 ranks"),
        ("resume=/mnt/run/a", "resume=/mnt/run/a: pods that start again need resume=auto, which is added"),
    ],
)
def test_a_wrong_argument_is_one_line(typed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    own_data = [] if re.search("data_paths?=", typed) else [DATA]
    assert main([*typed.split(), *own_data]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and message in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


def test_the_command_prints_what_kubectl_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--nodes", "2", DATA]) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == manifests(parse(["--nodes", "2", DATA]))


def test_overrides_are_checked_before_the_cluster_sees_them() -> None:
    with pytest.raises(UserError, match="lr: input should be greater than or equal to 0"):
        render(parse([DATA, "lr=-1"]))


# ---- the commands, run here --------------------------------------------------------------------


class _Pods:
    """Two pods on this host: their commands under bash, as the first process of a session each."""

    def __init__(self, run: Path, overrides: list[str], log: Path) -> None:
        request = parse(["--nodes", "2", "--gpus", "0", DATA, f"checkpoint_path={VOLUME}/a"])
        torchrun = _torchrun(request)
        words = torchrun.removesuffix(" &").split(" pretrain.py ")[0]
        words = words.replace(f"--master-port={PORT}", f"--master-port={free_port()}")
        typed = shlex.join([*overrides, f"checkpoint_path={run}", "resume=auto"])
        self.script = kubernetes.script(request).replace(torchrun, f"{words} pretrain.py {typed} &")
        self.script = self.script.replace(f" {VOLUME}/a ", f" {run} ")
        assert VOLUME not in self.script
        self.log, self.pods = log, list[psutil.Popen]()

    def start(self, indices: tuple[int, ...] = (0, 1)) -> None:
        environment = without_launcher(os.environ) | {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with self.log.open("a") as log:
            self.pods = [
                psutil.Popen(
                    ["bash", "-c", self.script],
                    cwd=REPOSITORY,
                    env=environment | {"JOB_COMPLETION_INDEX": str(index)},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                for index in indices
            ]

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
    both.script = both.script.replace(f"timeout={MEETING_S}", "timeout=3")
    for index in (0, 1):
        both.start((index,))
        assert both.ended() == [1], log.read_text()


@pytest.mark.launch
def test_a_pod_that_is_started_alone_waits_for_the_other(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    both = _Pods(run, settings(data, None), log)
    first = list[psutil.Popen]()
    try:
        both.start((1,))
        first = both.pods
        _until(lambda: bool(first[0].children()), log)
        time.sleep(2)  # a pod may come later than that
        assert first[0].is_running()
        both.start((0,))
        assert both.ended() == [0] and first[0].wait(timeout=60) == 0, log.read_text()
    finally:
        both.kill()
        both.pods = first
        both.kill()
    assert_same_run(run, quiet_2)


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
