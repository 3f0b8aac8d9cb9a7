"""The page that solves Sudokus, in a browser without a network."""

import json
import re
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from dataset.augment import BOXES
from dataset.build_maze_dataset import main as build_maze
from dataset.sudoku import generate
from dataset.tasks.maze import MazeTask
from dataset.tasks.sudoku import SudokuTask
from models import ArchConfig, build_arch
from sharing.export import main as export
from sharing.exported import ExportedPuzzles, open_source
from sharing.segment import web, write
from sharing.weights_file import write_weights
from tests.viewer.conftest import Browser
from training.solver import Solver
from utils.command_line import read_config

pytestmark = pytest.mark.export
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "sudoku"
SHIPPED = ROOT / "docs" / "sudoku.html"


def data_of(page: str) -> dict[str, Any]:
    (packed,) = re.findall(r'id="data">([^<]*)<', page)
    data: dict[str, Any] = json.loads(zlib.decompress(b64decode(packed)))
    return data


def test_the_shipped_page_is_that_of_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To write it again: sharing.export examples/sudoku --format web -o FILE --data DATA."""
    monkeypatch.setattr(write, "compare", lambda *arguments: None)
    monkeypatch.setattr(write, "real_puzzles", lambda *arguments, **named: ([], 0))
    write.write_segment(open_source(str(MODEL), raw=False), "web", "float32", "", tmp_path)
    ours, shipped = (tmp_path / "page.html").read_text(), SHIPPED.read_text()
    assert data_of(ours) == data_of(shipped)
    assert re.sub('id="data">[^<]*<', "", ours) == re.sub('id="data">[^<]*<', "", shipped)


@pytest.fixture(scope="module")
def maze_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page of an untrained TRM of mazes, beside its dataset and its weights."""
    if not web.RUNTIME.is_dir():
        pytest.skip("onnxruntime-web isn't installed (npm ci --prefix viewer/solver)")
    folder = tmp_path_factory.mktemp("maze")
    assert build_maze(f"--output-dir {folder}/data --generate 2 --generate-test 12 --size 6".split()) == 0
    trm = ["arch=trm", "arch.forward_dtype=float32", "arch.hidden_size=32", "arch.num_heads=2", "arch.halt_max_steps=3"]
    arch = TypeAdapter(ArchConfig).validate_python(read_config("pretrain", trm)["arch"])
    sizes = {"seq_len": 36, "vocab_size": 6, "num_puzzle_identifiers": 1}
    model = build_arch(arch, **sizes)
    generator = torch.Generator().manual_seed(1)
    model.init_weights(generator)
    for weight in model.parameters():  # else nearly all tokens are as likely as each other
        weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    described = ExportedPuzzles.model_validate({"format": 1, "arch": arch, "data": [], "run": "", "step": 0, **sizes})
    write_weights(folder / "model.safetensors", model.state_dict(), described.as_metadata())
    page = folder / "page.html"
    words = f"{folder}/model.safetensors --format web -o {page} --data {folder}/data"
    assert export(words.split()) == 0
    return page


def test_onnxruntime_solves_a_maze_that_a_person_painted(browser: Browser, maze_page: Path) -> None:
    from selenium.webdriver import Keys

    browser.open(maze_page)
    line = "document.querySelector('#line').value"
    before = browser.get(line)
    browser.click("button[title=start]")
    browser.run("document.querySelector('.painted').focus()")
    at = before.index(" ")
    browser.keys(*[Keys.ARROW_DOWN] * (at // 6), *[Keys.ARROW_RIGHT] * (at % 6), Keys.SPACE)
    cells = list(before)
    cells[at], cells[before.index("S")] = "S", " "
    painted = "".join(cells)
    assert browser.get(line) == painted
    browser.keys(Keys.ENTER)
    browser.wait("document.querySelector('#status').innerText.includes(' s.')", 60)
    answers = browser.get("document.querySelector('#slider').max")
    (solution,) = Solver.from_checkpoint(maze_page.with_name("model.safetensors"), device="cpu").solve([painted])
    assert answers == str(len(solution.steps))


def test_a_page_without_its_runtime_says_so(chromium: Browser, maze_page: Path, tmp_path: Path) -> None:
    alone = tmp_path / "page.html"
    alone.write_bytes(maze_page.read_bytes())
    from selenium.common import TimeoutException

    with pytest.raises(TimeoutException):
        chromium.open(alone)
    assert "onnxruntime-web-" in chromium.text("#loading")


def answers_of(browser: Browser, page: Path, lines: list[str]) -> list[str]:
    """Return what the worker of a page answers, of a board as a line of characters."""
    browser.open(page)
    browser.run(
        """
        const [lines] = arguments;
        const text = (id) => document.getElementById(id).textContent;
        const inflated = (packed) => new Response(
          new Blob([Uint8Array.from(atob(packed), (one) => one.charCodeAt(0))]).stream()
            .pipeThrough(new DecompressionStream("deflate")));
        const data = await inflated(text("data")).json();
        const beside = globalThis.onnxruntimeWeb;
        const bytes = (name) => inflated(beside[name]).arrayBuffer();
        const runtime = beside && { module: await bytes("module"), wasm: await bytes("wasm") };
        const worker = new Worker(URL.createObjectURL(new Blob([text("worker")])));
        const { symbols } = data.host;
        window.found = [];
        const tokensOf = (line) => [...line].map((one) => symbols.indexOf(one));
        const ask = (line) => line && worker.postMessage({ tokens: tokensOf(line), options: {} });
        let answer;
        worker.onmessage = ({ data }) => {
          if (!data.done) return (answer = data.answer);
          found.push(answer.map((token) => symbols[token]).join(""));
          return ask(lines[found.length]);
        };
        worker.postMessage({ ...data, runtime });
        ask(lines[0]);
        """,
        lines,
    )
    browser.wait(f"window.found?.length === {len(lines)}", 120)
    found: list[str] = browser.get("found")
    return found


def test_the_page_answers_200_puzzles_as_pytorch_does(browser: Browser) -> None:
    rng = np.random.default_rng(7)
    lines = [
        SudokuTask(box).plain(question_S + 1)
        for box, num in ((BOXES["2x2"], 20), (BOXES["2x3"], 80), (BOXES["3x3"], 100))
        for question_S, _ in generate(num, box, rng)
    ]
    solutions = Solver.from_checkpoint(MODEL, device="cpu").solve(lines)
    expected = [solution.steps[solution.settled_at - 1].answer for solution in solutions]
    assert answers_of(browser, SHIPPED, lines) == expected


def test_onnxruntime_answers_as_pytorch_does(browser: Browser, maze_page: Path) -> None:
    examples = data_of(maze_page.read_text())["examples"]
    lines = ["".join(MazeTask(6).symbols[token] for token in example["tokens"]) for example in examples]
    solutions = Solver.from_checkpoint(maze_page.with_name("model.safetensors"), device="cpu").solve(lines)
    expected = [str(solution.steps[solution.settled_at - 1].answer) for solution in solutions]
    found = answers_of(browser, maze_page, lines)
    different = sum(one != other for one, other in zip("".join(found), "".join(expected), strict=True))
    assert different <= 4, "of 432 cells, few are as likely to be one token as another"


def test_a_person_types_a_puzzle_and_the_model_solves_it(browser: Browser) -> None:
    from selenium.webdriver import Keys

    browser.open(SHIPPED)
    enter(browser, "#size", "4", "change")
    browser.click("#cells input")
    puzzle = "1.3....24..1..4."
    browser.keys(*(Keys.ARROW_RIGHT if cell == "." else cell for cell in puzzle))
    typed = "[...document.querySelectorAll('#cells input')].map((input) => input.value || '.').join('')"
    assert browser.get(typed) == puzzle
    browser.keys(Keys.ENTER)
    browser.wait("document.querySelector('#verdict').innerText.includes('solved from')")
    browser.click("#last")
    assert "would halt here" in browser.text("#said")


def enter(browser: Browser, selector: str, value: str, event: str) -> None:
    browser.run(
        "const on = document.querySelector(arguments[0]);"
        "on.value = arguments[1]; on.dispatchEvent(new Event(arguments[2]))",
        *(selector, value, event),
    )


def test_a_click_on_solve_shows_every_step(browser: Browser) -> None:
    browser.open(SHIPPED)
    seen = set()
    for _ in range(3):
        browser.click("#solve")
        browser.wait("document.querySelector('#verdict').innerText !== ''", 30)
        seen.add(browser.text("#verdict"))
        assert re.fullmatch(r"\d+ steps?(, \d+\.\d\d s\.| in pass \d+, \d+\.\d\d s\.).*", browser.text("#status"))
        browser.click("#last")
        assert browser.get("document.querySelector('#slider').value") == browser.get(
            "document.querySelector('#slider').max"
        )
        browser.click("#next")
        assert browser.text("#verdict") == "", "another example must forget the answer"
    assert all("solved from step" in verdict for verdict in seen), seen


@pytest.mark.parametrize("line", ["1234", "1" * 82, "a" * 81, "55" + "." * 79, "." * 80])
def test_a_mistake_is_a_sentence(browser: Browser, line: str) -> None:
    browser.open(SHIPPED)
    enter(browser, "#line", line, "input")
    if line.startswith("55"):
        browser.click("#solve")
    assert len(browser.text("#mistake")) > 20
    browser.click("#next")
    browser.click("#solve")
    browser.wait("document.querySelector('#verdict').innerText.includes('solved')", 30)


def test_a_phone_and_dark_mode(browser: Browser) -> None:
    browser.open(SHIPPED, width=380, height=800)
    assert browser.get("document.documentElement.scrollWidth") <= 380
    light = browser.get("getComputedStyle(document.body).backgroundColor")
    browser.click("#theme")
    assert browser.get("getComputedStyle(document.body).backgroundColor") != light
