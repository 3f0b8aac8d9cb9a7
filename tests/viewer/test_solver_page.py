"""The page that solves Sudokus, in a browser without a network."""

import json
import re
import zlib
from base64 import b64decode
from pathlib import Path

import numpy as np
import pytest

from dataset.augment import BOXES
from dataset.sudoku import generate
from dataset.tasks.sudoku import SudokuTask
from sharing.exported import open_source
from sharing.segment import write
from tests.viewer.conftest import Browser
from training.solver import Solver

pytestmark = pytest.mark.export
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "sudoku"
SHIPPED = ROOT / "docs" / "sudoku.html"


def data_of(page: str) -> dict[str, object]:
    (packed,) = re.findall(r'id="data">([^<]*)<', page)
    data: dict[str, object] = json.loads(zlib.decompress(b64decode(packed)))
    return data


def test_the_shipped_page_is_that_of_the_shipped_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To write it again: sharing.export examples/sudoku --format web -o FILE --data DATA."""
    for name in ("compare", "real_puzzles"):
        monkeypatch.setattr(write, name, lambda *arguments, **named: None)
    write.write_segment(open_source(str(MODEL), raw=False), "web", "float32", "", tmp_path)
    ours, shipped = (tmp_path / "page.html").read_text(), SHIPPED.read_text()
    assert data_of(ours) == data_of(shipped)
    assert re.sub('id="data">[^<]*<', "", ours) == re.sub('id="data">[^<]*<', "", shipped)


def test_the_page_answers_200_puzzles_as_pytorch_does(browser: Browser) -> None:
    rng = np.random.default_rng(7)
    lines = [
        SudokuTask(box).plain(question_S + 1)
        for box, num in ((BOXES["2x2"], 20), (BOXES["2x3"], 80), (BOXES["3x3"], 100))
        for question_S, _ in generate(num, box, rng)
    ]
    solutions = Solver.from_checkpoint(MODEL, device="cpu").solve(lines)
    expected = [solution.steps[solution.settled_at - 1].answer for solution in solutions]
    browser.open(SHIPPED)
    browser.run(
        """
        const [lines] = arguments;
        const { host, weights } = JSON.parse(await new Response(
          new Blob([Uint8Array.from(atob($("data").textContent), (one) => one.charCodeAt(0))]).stream()
            .pipeThrough(new DecompressionStream("deflate"))).text());
        const worker = new Worker(URL.createObjectURL(new Blob([$("worker").textContent])));
        window.found = [];
        let answer;
        worker.onmessage = ({ data }) => {
          if (data.done) found.push(answer.map((token) => host.symbols[token]).join(""));
          else answer = data.answer;
        };
        worker.postMessage({ host, weights });
        for (const line of lines)
          worker.postMessage({ tokens: [...line].map((one) => host.symbols.indexOf(one)), options: {} });
        """.replace("$(", "document.getElementById("),
        lines,
    )
    browser.wait(f"window.found?.length === {len(lines)}", 120)
    assert browser.get("found") == expected


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
