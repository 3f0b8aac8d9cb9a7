/** The views of the page, of which one is open. */

import { Curves } from "./curves.mjs";
import { $, button, make } from "./dom.mjs";
import { Examples } from "./examples.mjs";
import { showComparison, showNone, showResults } from "./tables.mjs";
import { Lengths, Texts } from "./texts.mjs";
import { Votes } from "./votes.mjs";

/** Return the views that a page has: [name, title, the function that builds it]. */
function viewsOf(page, tabs) {
  const isData = page.kind === "dataset";
  const showPuzzles = (agreement) => {
    tabs.show("examples");
    tabs.open.view.compareBy(agreement);
  };
  const hasNone = page.kind === "run" && !page.examples.length && !page.texts;
  return [
    [page.kind === "runs", "compare", "Comparison", () => showComparison(page, showPuzzles)],
    [page.examples.length, "examples", isData ? "Puzzles" : "Reasoning", () => new Examples(page)],
    [hasNone, "none", "Reasoning", () => showNone(page)],
    [page.texts?.length, "texts", isData ? "Samples" : "Answers", () => new Texts(page)],
    [page.lengths?.length, "lengths", "Lengths", () => new Lengths(page.lengths)],
    [page.votes?.length, "votes", "ARC votes", () => new Votes(page.votes)],
    [page.curves?.length, "curves", "Curves", () => new Curves(page)],
    [page.results && page.kind === "run", "results", "Results", () => showResults(page.results)],
  ].flatMap(([has, name, title, build]) => (has ? [{ name, title, build }] : []));
}

/** The views of the page. Each has a tab and a panel, and one of them is open. */
export class Tabs {
  constructor(page) {
    this.tabs = viewsOf(page, this);
    this.open = this.tabs[0];
    for (const { name, title } of this.tabs) {
      const tab = { role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}` };
      $("tabs").append(button(() => this.show(name), tab, title));
      const panel = { id: `panel-${name}`, role: "tabpanel", "aria-labelledby": `tab-${name}` };
      if (!$(panel.id)) $("main").append(make("section", { class: "stack", ...panel }));
    }
    $("tabs").hidden = this.tabs.length < 2;
    $("tabs").addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      const { name } = this.tabs.at((this.tabs.indexOf(this.open) + by) % this.tabs.length);
      this.show(name);
      $(`tab-${name}`).focus();
    });
    // A run without predictions opens with its curves.
    this.show((this.tabs.find(({ name }) => name !== "none") ?? this.tabs[0]).name);
  }

  show(name) {
    this.open.view?.pause?.();
    for (const tab of this.tabs) {
      const is = tab.name === name;
      $(`panel-${tab.name}`).hidden = !is;
      $(`tab-${tab.name}`).setAttribute("aria-selected", String(is));
      $(`tab-${tab.name}`).tabIndex = is ? 0 : -1;
      if (is) this.open = tab;
    }
    // A hidden panel has no size, so a view is built when it is first shown.
    if (this.open.view === undefined) this.open.view = this.open.build() ?? null;
    this.open.view?.redraw?.();
  }

  restyle() {
    for (const { view } of this.tabs) (view?.restyle ?? view?.redraw)?.call(view);
  }
}
