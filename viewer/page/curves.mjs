/** The view of the curves of a run, or of several runs. */

import { colours } from "./boards.mjs";
import { $, breakable, button, clamp, make, numberText, option, span } from "./dom.mjs";
import { plot, plotKeys, smoothed } from "./plot.mjs";

const DASHES = ["none", "7 4", "2 4", "9 4 2 4"];

export class Curves {
  constructor(page) {
    this.metrics = page.curves;
    this.overSteps = page.over_steps;
    this.isOneRun = page.kind === "run";
    this.smooth = true;
    this.log = false;
    const over = Object.keys(this.metrics[0].over);
    const every = this.metrics.flatMap((metric) => metric.over[over[0]]);
    // A series has one colour in all metrics.
    this.names = [...new Set(every.map(({ name }) => name))].filter((name) => name !== "train");
    $("bands").hidden = !every.some(({ low }) => low);
    const sets = [...new Set(this.overSteps.map(({ set }) => set))];
    $("over-steps-card").hidden = sets.length === 0;
    this.fill("metric", this.metrics.map(({ metric }) => metric));
    this.fill("over", over, (name) => `over ${name === "step" ? "steps" : name}`);
    this.fill("over-steps-set", sets);
    for (const name of ["smooth", "log"]) {
      $(name).addEventListener("click", () => {
        this[name] = !this[name];
        $(name).setAttribute("aria-pressed", String(this[name]));
        this.redraw();
      });
    }
    const choose = (metric) => {
      $("metric").value = metric.metric;
      this.redraw();
      const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
      $("curve").scrollIntoView({ block: "nearest", behavior: isCalm ? "auto" : "smooth" });
    };
    this.minis = this.metrics.map((metric) => button(() => choose(metric), { class: "mini" }));
    $("minis").append(...this.minis);
  }

  /** Fill a choice, which is hidden if there is nothing to choose from. */
  fill(id, choices, textOf = (name) => name) {
    $(id).append(...choices.map((name) => option(name, textOf(name))));
    $(id).hidden = choices.length < 2;
    $(id).addEventListener("change", () => this.redraw());
  }

  /** Return the lines of a metric for `plot`: training in grey, and means of several seeds with a band. */
  series(metric) {
    return metric.over[$("over").value].flatMap(({ name, x, values, low, high }) => {
      const place = this.names.indexOf(name);
      const points = x.map((each, i) => [each, values[i]]);
      const line = {
        name,
        colour: place < 0 ? colours.train : colours[`series-${(place % 4) + 1}`],
        dash: place < 0 ? "none" : DASHES[(this.isOneRun ? place : Math.floor(place / 4)) % 4],
        points,
        dots: place >= 0 && points.length <= 60,
        band: low && x.map((each, i) => [each, low[i], high[i]]),
      };
      const isSmoothed = this.smooth && points.length >= 40 && !(this.isOneRun && place >= 0);
      if (!isSmoothed) return [line];
      const mean = smoothed(points, Math.ceil(points.length / 60));
      return [{ ...line, faint: true }, { ...line, band: undefined, points: mean }];
    });
  }

  redraw() {
    const chosen = this.metrics.find(({ metric }) => metric === $("metric").value);
    const series = this.series(chosen);
    const x = $("over").value;
    plot($("curve"), {
      series,
      height: clamp(window.innerHeight * 0.42, 240, 400),
      log: this.log,
      x,
      label: `${chosen.metric} over training ${x === "seconds" ? "time" : x}`,
    });
    $("curve").append(plotKeys(series));
    this.metrics.forEach((metric, i) => {
      const { name, values } = this.isOneRun ? metric.over[x].at(-1) : {};
      const newest = this.isOneRun ? [make("b", {}, numberText(values.at(-1))), " ", span("small quiet", name)] : [];
      this.minis[i].setAttribute("aria-current", String(metric === chosen));
      this.minis[i].replaceChildren(span("quiet", ...breakable(metric.metric)), ...newest);
    });
    if (!$("over-steps-card").hidden) this.drawOverSteps();
  }

  /** Draw the accuracy after each reasoning step. Only the last evaluation has a colour. */
  drawOverSteps() {
    const of = this.overSteps.filter(({ set }) => set === $("over-steps-set").value);
    const chosen = of.length <= 4 ? of : [0, 1, 2, 3].map((i) => of[Math.round((i * (of.length - 1)) / 3)]);
    const series = chosen.map(({ step, counts, values }, i) => {
      const last = i === chosen.length - 1;
      return {
        name: `training step ${step.toLocaleString("en")}`,
        colour: last ? colours["series-1"] : colours.train,
        dash: last ? "none" : DASHES[i + 1],
        dots: last,
        points: counts.map((count, k) => [count, values[k]]),
      };
    });
    const label = "Exact accuracy over reasoning steps";
    plot($("over-steps"), { series, height: 260, low: 0, x: "reasoning step", label });
    $("over-steps").append(plotKeys(series));
  }
}
