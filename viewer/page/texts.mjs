/** The views of text: samples with their tokens, and how many samples have how many tokens. */

import { colours } from "./boards.mjs";
import { $, card, make, numberText, option, plural, span } from "./dom.mjs";
import { List } from "./list.mjs";
import { plot } from "./plot.mjs";

/** The view of samples: a list, and the tokens of one sample. */
export class Texts extends List {
  constructor({ texts, kind }) {
    super("text-");
    this.texts = texts;
    for (const text of texts) {
      const plain = text.parts.map(({ pieces }) => pieces.map(plainText).join(""));
      text.search = plain.join("\n").toLowerCase();
      text.begin = plain[0].slice(0, 80);
    }
    for (const [key, all] of [
      ["set", kind === "run" ? "all steps" : "all sets"],
      ["task", "all tasks"],
    ]) {
      const values = [...new Set(texts.map((text) => text[key]))];
      const select = $(`text-${key}`);
      select.append(option("", all), ...values.map((value) => option(value, value)));
      select.hidden = values.length < 2;
      select.addEventListener("change", () => this.refill());
    }
    this.refill();
  }

  matching(query) {
    const set = $("text-set").value,
      task = $("text-task").value;
    return this.texts.filter(
      (text) => (!set || text.set === set) && (!task || text.task === task) && text.search.includes(query),
    );
  }

  counted() {
    return plural(this.shown.length, "sample");
  }

  describe(text) {
    const mark = { true: "✓ ", false: "✗ " }[text.is_right] ?? "";
    return [span("", make("b", {}, mark + sampleName(text)), span("small quiet", text.begin))];
  }

  show() {
    $("text-stage").replaceChildren();
    if (!this.current) return;
    const { task, is_right: isRight, parts } = this.current;
    const verdict = isRight === undefined ? null : span(isRight ? "good" : "bad", isRight ? "✓ right" : "✗ wrong");
    $("text-stage").append(
      make("h2", {}, `${sampleName(this.current)} `, span("quiet", `${task} `), verdict),
      ...parts.flatMap(partOf),
    );
  }
}

/** Make the heading and the tokens of a part of a sample. */
function partOf({ title, num_tokens: count, shown, pieces }) {
  const length = count === undefined ? "" : ` · ${plural(count, "token")}`;
  const note = shown < count ? `, of which the first ${shown.toLocaleString("en")} are shown` : "";
  return [make("h3", {}, title + length + note), make("div", { class: "said-text" }, ...pieces.map(pieceOf))];
}

const sampleName = (text) => `${text.set}, sample ${text.row.toLocaleString("en")}`;

/** Return the text of a piece, without special tokens. */
const plainText = (piece) => (typeof piece === "string" ? piece : (piece[0] ?? ""));

/** Make the element of a piece. A token has a ground, and its number as its title. */
function pieceOf(piece) {
  if (typeof piece === "string") return piece;
  if (!Array.isArray(piece)) return make("b", { class: "special" }, piece.special);
  const [text, ...numbers] = piece;
  const name = numbers.length > 1 ? "tokens" : "token";
  return make("span", { class: "token", title: `${name} ${numbers.join(", ")}` }, text);
}

/** The view that shows how many samples of each set have how many tokens. */
export class Lengths {
  constructor(lengths) {
    this.lengths = lengths;
    this.plots = lengths.map(() => make("div", { class: "plot" }));
    const cards = lengths.map(({ set, counts, mean, longest }, i) => {
      const num = plural(counts.reduce((sum, count) => sum + count, 0), "sample");
      const about = `${num}: mean ${numberText(mean)}, longest ${longest.toLocaleString("en")}`;
      return card(`Tokens of the samples of ${set}`, make("p", { class: "small quiet" }, about), this.plots[i]);
    });
    $("panel-lengths").append(...cards);
  }

  redraw() {
    this.lengths.forEach(({ set, least, width, counts }, i) => {
      // An empty bar at each end keeps the other bars inside of the axes.
      const points = [0, ...counts, 0].map((count, bar) => [least + (bar - 1) * width + (width - 1) / 2, count]);
      const band = points.flatMap(([x, count]) => [
        [x - width / 2, 0, count],
        [x + width / 2, 0, count],
      ]);
      const name = width === 1 ? "samples" : `samples within ${(width - 1) / 2}`;
      // The line between the bars has no colour. Its points are the values that the pointer shows.
      plot(this.plots[i], {
        series: [{ name, colour: "none", points }, { name, colour: colours["series-1"], points: [], band }],
        height: 260,
        low: 0,
        x: "tokens",
        label: `Lengths of the samples of ${set}`,
      });
    });
  }
}
