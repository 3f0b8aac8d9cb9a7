"""The rules of the code's structure, checked in the sources: imports, and things with one place."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SIBLINGS = ("models", "optim", "dataset")
PACKAGES = sorted(
    path.name
    for path in ROOT.iterdir()
    if path.is_dir() and path.name != "tests" and not path.name.startswith(".") and any(path.rglob("*.py"))
)


def _sources() -> list[Path]:
    """Return the paths of the project's own modules without tests, relative to the root."""
    found = [*ROOT.glob("*.py"), *(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))]
    return sorted(path.relative_to(ROOT) for path in found)


SOURCES = _sources()
ENTRYPOINTS = [path.stem for path in SOURCES if len(path.parts) == 1]


def each_source(check: Callable[[Path], None]) -> Callable[[], None]:
    """Make one test of a check of a module. A test for each module would take longer."""

    def test() -> None:
        wrong = []
        for path in SOURCES:
            try:
                check(path)
            except Exception as error:  # also that of a check that can't read the module
                wrong.append(f"{path}: {type(error).__name__}: {error}")
        assert not wrong, "\n".join(wrong)

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return dotted names, also of imports inside functions. `from a import b` gives a and a.b."""
    found = set[str]()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def _packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in _imports(path)}


@cache
def _names(path: Path) -> frozenset[str]:
    """Return every dotted expression as written, such as os.environ or dist.all_reduce."""
    return frozenset(ast.unparse(node) for node in ast.walk(_tree(path)) if isinstance(node, ast.Attribute))


def test_the_walk_finds_the_project() -> None:
    assert {"pretrain", "evaluate"} <= set(ENTRYPOINTS)
    assert {
        Path("training/plan.py"),
        Path("models/hrm.py"),
        Path("optim/adam.py"),
        Path("dataset/loader.py"),
        Path("utils/ranks/world.py"),
    } <= set(SOURCES)


# The code that starts, kills and compares runs is in tests/runs.py. These benchmarks may import it.
MAY_STRIKE_RUNS = {Path(f"benchmarks/{name}.py") for name in ("faults", "soak", "soak_rank")}


# entrypoints -> training -> sharing -> {models, dataset, optim} -> records -> utils; entrypoints do
# not import one another.
BELOW_ENTRYPOINTS = {"search", "training", "sharing", *SIBLINGS, "records", "utils", "viewer"}
MAY_IMPORT = {
    "training": {"sharing", *SIBLINGS, "records", "utils"},
    "sharing": {*SIBLINGS, "records", "utils"},
    **{sibling: {"records", "utils"} for sibling in SIBLINGS},
    "viewer": {"sharing", "dataset", "records", "utils"},
    "search": {"training", "sharing", *SIBLINGS, "records", "utils", "viewer"},
    "records": {"utils"},
    "utils": set[str](),
    # Programs that take the steps of a run one at a time take those of pretrain.py.
    "benchmarks": {*BELOW_ENTRYPOINTS, "pretrain"},
    "launch": {*BELOW_ENTRYPOINTS, "pretrain"},
    # The installed package offers a class of solve.py.
    "release": {"solve", "utils"},
}


SCRIPT_FOLDERS = sorted({path.parent for path in SOURCES if '__name__ == "__main__"' in (ROOT / path).read_text()})


@pytest.mark.parametrize("folder", SCRIPT_FOLDERS, ids=str)
def test_no_module_beside_a_script_shadows_another(folder: Path) -> None:
    """`python folder/file.py` puts the folder first on sys.path.

    With a dataset/inspect.py, NumPy would import that file in place of the standard library's
    inspect.
    """
    names = {path.stem for path in (ROOT / folder).glob("*.py")}
    names |= {path.parent.name for path in (ROOT / folder).glob("*/*.py") if not path.parent.name.startswith(".")}
    # This project itself may be installed too.
    own = tomllib.loads((ROOT / "pyproject.toml").read_text()).get("project", {}).get("name")
    installed = {name for name, distributions in packages_distributions().items() if own not in distributions}
    installed -= {"tests"}  # mlx says that it installs them, and has no such file
    hidden = names & (sys.stdlib_module_names | installed)
    assert not hidden, f"a script in {folder} would import these in place of the modules of that name; rename them"


@each_source
def test_imports_go_one_way(path: Path) -> None:
    package = path.parts[0] if len(path.parts) > 1 else None
    assert package is None or package in MAY_IMPORT, f"say in MAY_IMPORT what {package}/ may import"
    allowed = MAY_IMPORT[package] | {package} if package is not None else BELOW_ENTRYPOINTS
    if path in MAY_STRIKE_RUNS:
        allowed = allowed | {"tests"}
    if path == Path("setup.py"):
        allowed = {"release", "utils"}
    wrong = _packages(path) & {*ENTRYPOINTS, *PACKAGES, "tests"} - allowed
    assert not wrong, (
        f"{path} imports {', '.join(sorted(wrong))}, but may only import {', '.join(sorted(allowed))}: "
        "move what both need below both, or hand it down as an argument"
    )


# Keys that utils/ranks and utils/perf own, and words that mean something else there.
OF_UTILS = {"dist", "profile", "device", "compile", "deterministic", "resume", "sweep", "defaults", "freeze"}


@each_source
def test_utils_knows_no_puzzle_no_architecture_and_no_key(path: Path) -> None:
    """What names one is handed in, or stands in a module above."""
    if path.parts[0] != "utils":
        return
    keys = re.findall(r"^(\w+):", (ROOT / "config/pretrain.yaml").read_text(), re.MULTILINE)
    files = (ROOT / "config").glob("*/[!_]*.yaml")
    named = {*keys, *(name for file in files for name in (file.parent.name, file.stem))} - OF_UTILS
    tasks = {file.stem for file in (ROOT / "dataset/tasks").glob("[!_]*.py")} - {"base", "tokens", "sizes", "square"}
    documented = [
        node for node in ast.walk(_tree(path)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    docstrings = {id(node.body[0].value) for node in documented if node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(_tree(path)):
        texts = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "value")]
        for text in texts if id(node) not in docstrings else []:
            words = set(re.findall(r"[\w-]+", text)) if isinstance(text, str) else set[str]()
            parts = {part for word in words for part in word.split("_")}
            found = words & named | parts & {"puzzle", "puzzles", *tasks}
            assert not found, f"{path}:{getattr(node, 'lineno', '?')} names {', '.join(sorted(found))}"


MAY_TALK = {
    *(path for path in SOURCES if path.is_relative_to("utils/ranks") or path.is_relative_to("records/checkpoint")),
    *(Path("utils/program.py"), Path("launch/torchrun.py"), Path("optim/muon.py"), Path("optim/sparse_sign_sgd.py")),
    *(Path("models/parallel") / f"{name}.py" for name in ("ddp", "dtensor", "fsdp", "pipeline", "tensor")),
}
# Only communication has its places. Tensors that are sharded over ranks are values, allowed
# everywhere.
VALUES = {"torch.distributed.tensor", "torch.distributed.tensor.DTensor"}


@each_source
def test_collectives_have_their_places(path: Path) -> None:
    if path not in MAY_TALK:
        imported = _imports(path) - VALUES
        assert not [name for name in imported if name.startswith(("torch.distributed", "torch._C._distributed"))]
        assert not [name for name in _names(path) if name.startswith("torch.distributed")]


@each_source
def test_wandb_stays_behind_the_metrics(path: Path) -> None:
    if path != Path("records/metrics/weights_and_biases.py"):
        assert "wandb" not in _packages(path)
    else:
        at_import = [node for node in _tree(path).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "wandb" not in "".join(map(ast.unparse, at_import)).replace("utils", ""), "import it only when used"


MAY_READ_ENVIRONMENT = {
    *(path for path in SOURCES if path.is_relative_to("utils/ranks")),
    *(Path("utils/program.py"), Path("utils/shell.py"), Path("utils/secrets.py")),
    Path("utils/openmp.py"),  # says how OpenMP's threads wait, unless the user says it
    Path("utils/compiled_code.py"),  # says where PyTorch keeps compiled code, unless the user says it
    Path("search/slurm.py"),  # jobs inherit the environment of the sweep, but not what a launcher says there
    Path("search/launchers.py"),  # a run of a sweep gets the environment of the sweep, and the number of its threads
}


@each_source
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    if path not in MAY_READ_ENVIRONMENT and path.parts[0] not in ("launch", "benchmarks"):  # these start programs
        reads = {"os.environ", "os.getenv", "os.putenv", "os.unsetenv"}
        assert not reads & (_names(path) | _imports(path))


@pytest.mark.parametrize("name", ["pretrain.py", "evaluate.py", "solve.py"])
def test_programs_that_compute_say_how_threads_wait_before_torch_is_loaded(name: str) -> None:
    imports = [node for node in _tree(Path(name)).body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert ast.unparse(imports[0]) == "from utils import openmp", "OpenMP reads its variables when torch loads it"


CAN_RUN_CODE = ("pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch.load", "torch.save")
# Published checkpoints are pickles. Only these modules read and write them: one by torch.load with
# weights_only, the other with a list of the names that a pickle may use.
READS_PICKLES = Path("sharing/weights_file.py")
UNPICKLES_BY_LIST = Path("sharing/dcp_folder.py")


_PICKLE_WITH_A_LIST = {"pickle", "pickle.Unpickler", "pickle.UnpicklingError"}


def test_a_pickle_uses_only_names_of_a_list() -> None:
    """The only Unpickler gets its names from a dict, and never from Python's own look-up."""
    classes = [node for node in ast.walk(_tree(UNPICKLES_BY_LIST)) if isinstance(node, ast.ClassDef)]
    (unpickler,) = (node for node in classes if "pickle.Unpickler" in map(ast.unparse, node.bases))
    (find_class,) = unpickler.body
    assert isinstance(find_class, ast.FunctionDef) and find_class.name == "find_class"
    calls = {ast.unparse(node.func) for node in ast.walk(find_class) if isinstance(node, ast.Call)}
    assert calls == {"_ALLOWED.get", "pickle.UnpicklingError"}


@each_source
def test_nothing_that_is_loaded_can_run_code(path: Path) -> None:
    names = _names(path)
    allowed = {READS_PICKLES: {"torch.load", "torch.save"}, UNPICKLES_BY_LIST: _PICKLE_WITH_A_LIST}.get(path, set())
    found = (_imports(path) | names) - allowed
    assert not {name for name in found if name in CAN_RUN_CODE or name.split(".")[0] in CAN_RUN_CODE}
    assert not {name for name in names if name.endswith((".unsafe_load", ".full_load"))}
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called not in ("eval", "exec", "compile"), f"{path}:{node.lineno}"
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        assert arguments.get("allow_pickle", "False") == "False", f"{path}:{node.lineno}"
        if called == "torch.load" or "weights_only" in arguments:
            assert arguments.get("weights_only") == "True", f"{path}:{node.lineno}"
            assert "pickle_module" not in arguments and len(node.args) == 1, f"{path}:{node.lineno}"
        if called == "yaml.load":
            assert "Safe" in arguments.get("Loader", ""), f"{path}:{node.lineno}"


GLOBAL_RANDOMNESS = (
    *("random.seed", "random.random", "random.shuffle", "random.choice", "random.randint", "random.sample"),
    *("np.random.seed", "np.random.rand", "np.random.randint", "np.random.permutation", "np.random.shuffle"),
    *("torch.manual_seed", "torch.seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all"),
)


@each_source
def test_no_global_random_state(path: Path) -> None:
    assert not _names(path) & set(GLOBAL_RANDOMNESS)
    assert "random" not in _packages(path) or path.parts[0] in ("launch", "benchmarks")


MACHINES = (f"{ROOT.parent}/", "/root/", "/home/", "../shared", "/tmp/")


@each_source
def test_no_machine_is_named(path: Path) -> None:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert not [place for place in MACHINES if place in node.value], f"{path}:{node.lineno}"


# Everything between a batch and its update must leave the host free to run ahead of the device.
# Other parts of a step run in tests/test_fake_accelerator.py, where a wait is an error.
STEP_PATH = {
    "training/session.py": ("Session.add_to_sums",),
    "models/symbols.py": ("with_confidence", "confidence_logit"),
    "models/se_rrm.py": ("SERRM.embed",),
    "models/se_mixer.py": ("SEMixer.embed", "SEMixer._extent"),
    "models/dropout.py": ("attend_with_dropout", "kept", "derived"),
    "models/text/model.py": ("TextModel.hidden", "TextModel.logits", "_Calls.__call__"),
    "models/text/block.py": ("Stack.rotary",),
    "models/text/packing.py": ("Packing.attend",),
    "models/text/losses.py": ("chunked_cross_entropy", "text_sums"),
    "models/puzzle_embedding.py": ("ShardedPuzzleEmbedding.rows",),
    "optim/adam.py": ("Adam.update", "AdamW._step_", "AdamATan2._step_"),
    "optim/muon.py": ("Muon.update",),
    "optim/sparse_sign_sgd.py": ("_update_own_",),
    "training/step_graph.py": ("StepGraph.__call__", "StepGraph.step"),
    "models/parallel/dtensor.py": ("DTensorLayout.grad_norm", "DTensorLayout.clip_"),
    "models/parallel/ddp.py": ("_sum",),
    "dataset/tasks/sudoku.py": ("SudokuTask.judge",),
    "dataset/evaluators.py": ("Evaluators.judge",),
    "utils/ranks/world.py": ("World.sum_", "World.gather_rows"),
}
WAITING_METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "synchronize", "is_nonzero"}
WAITING_CALLS = {"float", "int", "bool", "print"}


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    for outer in tree.body:
        if isinstance(outer, ast.ClassDef):
            methods = [node for node in outer.body if isinstance(node, ast.FunctionDef)]
            found |= {f"{outer.name}.{node.name}": node for node in methods}
    return found


def _on_step_path() -> list[tuple[str, str]]:
    """Return STEP_PATH, the forward of every network, and the step of every optimizer."""
    listed = [(file, name) for file, names in STEP_PATH.items() for name in names]
    methods = [("models", ".forward"), ("models/text", ".forward"), ("optim", ".step")]
    found = [
        (f"{folder}/{path.name}", name)
        for folder, method in methods
        for path in sorted((ROOT / folder).glob("*.py"))
        for name in _functions(_tree(path))
        if name.endswith(method)
    ]
    return list(dict.fromkeys([*listed, *found]))


@pytest.mark.parametrize("file, name", _on_step_path())
def test_a_training_step_does_not_wait_for_the_device(file: str, name: str) -> None:
    function = _functions(_tree(Path(file)))[name]
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            method = node.func.attr if isinstance(node.func, ast.Attribute) else None
            call = node.func.id if isinstance(node.func, ast.Name) else None
            assert method not in WAITING_METHODS, f"{file}:{node.lineno}: .{method}()"
            assert call not in WAITING_CALLS, f"{file}:{node.lineno}: {call}()"


def test_a_mark_stands_in_the_file_of_its_tests() -> None:
    """make test-faults and its like load only the files that name their mark."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    groups = {mark.split(":")[0] for mark in options["markers"]} - {"gpu"}  # make test-gpu loads every file
    assert "faults" in groups
    for path in (ROOT / "tests").rglob("*.py"):
        found = groups.intersection(re.findall(r"mark\.(\w+)", path.read_text()))
        assert path.name.startswith("test_") or not found, f"{path} marks tests of other files: {found}"
