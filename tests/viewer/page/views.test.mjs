/** The other views: curves, tables, texts and votes. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { choose, click, find, open, press, text } from "./browser.mjs";

const paths = (selector) => find(selector).find("path").map((path) => path.getAttribute("d"));

test("curves can be chosen and read", async () => {
  const { tabs } = await open("bare");
  assert.equal(tabs.open.name, "curves", "a run without answers must open with its curves");
  assert.equal(find("#metric").value, "exact_accuracy");
  const first = paths("#curve");
  choose("#metric", "lm_loss");
  assert.notDeepEqual(paths("#curve"), first);
  const linear = paths("#curve");
  click("#log");
  assert.notDeepEqual(paths("#curve"), linear);
  find("#curve").focus();
  press("ArrowLeft");
  assert.match(text("#curve .tip"), /^step 500 train 0.0\d+ eval all 0.006$/);
  assert.match(text("#minis"), /exact_accuracy 0.5 eval all lm_loss 0.006 eval all perf\/ step_ms 12.5 train/);
  find("#minis").find("button").at(-1).click();
  assert.equal(find("#metric").value, "perf/step_ms");
  assert.match(text("#over-steps"), /training step 500/);
  assert.ok(find("#bands").hidden, "there is no band to explain");
  click("#tab-none");
  assert.match(text("#panel-none"), /python evaluate.py checkpoint=/);
});

test("only long curves are smoothed, and only if the reader wants it", async () => {
  await open("bare");
  const lines = () => find("#curve").find("path").length;
  assert.equal(lines(), 3, "training, faint and smoothed, and the test set");
  click("#smooth");
  assert.equal(lines(), 2);
});

test("curves of several runs have bands, and go over steps or seconds", async () => {
  await open("runs");
  click("#tab-curves");
  assert.equal(text("#curve .keys"), "arch=hrm lr=0.0002 arch=trm lr=0.001 (2 seeds)");
  assert.ok(!find("#bands").hidden);
  find("#curve").focus();
  press("ArrowLeft");
  assert.match(text("#curve .tip"), /^step 500/);
  choose("#over", "seconds");
  find("#curve").focus();
  press("ArrowLeft");
  assert.match(text("#curve .tip"), /^seconds 62.5/);
});

test("a band that touches zero is drawn on a log scale", async () => {
  await open("mixed");
  click("#tab-curves");
  click("#log");
  const drawn = paths("#curve");
  assert.ok(drawn.some((d) => d.endsWith("Z")), "there must be a band");
  assert.deepEqual(drawn.filter((d) => /Infinity|NaN/.test(d)), []);
});

test("results are tables", async () => {
  await open("run");
  click("#tab-results");
  assert.match(text("#panel-results"), /6 examples of the set all/);
  assert.match(text("#panel-results"), /eval\/all\/exact_accuracy 0.5 0.1876 to 0.8124 eval\/all\/lm_loss –/);
  assert.match(text("#panel-results"), /tta=8 all 12.5 0.5/);
  assert.match(text("#panel-results"), /0.2 to 0.3 6 0.25 0.5/);
});

test("configs and numbers of runs are compared", async () => {
  const { tabs } = await open("runs");
  assert.equal(tabs.open.name, "compare");
  assert.match(text("#panel-compare"), /arch\. name hrm trm trm/);
  assert.match(text("#panel-compare"), /No saved answers: trm-1\..*python view.py/);
  assert.match(text("#panel-compare"), /exact_accuracy 0.5 best 0.5 at 500/);
  assert.match(text("#panel-compare"), /trm-1 arch=trm lr=0.001, seed 1.* 0.5 0.1876 to 0.8124/);
});

test("only evaluations of the same examples have a winner", async () => {
  const cards = () => find("#panel-compare").find(".card");
  const evaluations = () => cards().find((card) => card.textContent.startsWith("Newest eval"));
  await open("mixed");
  const [seen, winners] = [evaluations().seen.replaceAll("|", " "), evaluations().find(".good")];
  const head = /step 500 500 – data data data – examples 3 examples of the set all 6 examples/;
  assert.match(seen.replace(/\s+/g, " "), head);
  assert.match(seen, /0.6667/);
  assert.match(seen, /no value is marked as the best/);
  assert.equal(winners.length, 0);
  await open("runs");
  assert.doesNotMatch(evaluations().seen, /marked as the best/);
});

test("text is browsed", async () => {
  await open("text");
  assert.equal(text("#text-count"), "3 samples");
  assert.match(text("#text-stage"), /^train, sample 0 adding instruction · 8 tokens start1 \+ 1\? end of instruction/);
  press("j");
  assert.match(text("#text-stage"), /Größe <b>\?/);
  assert.match(text("#text-stage"), /<\/script><script>/, "a name is text");
  choose("#text-set", "test");
  assert.match(text("#text-stage"), /In the beginning/);
  assert.equal(text("#text-count"), "1 sample");
  choose("#text-set", "");
  choose("#text-search", "GRÖßE", "input");
  assert.equal(text("#text-count"), "1 sample");
  click("#tab-lengths");
  assert.match(text("#panel-lengths"), /Tokens of the samples of train 2 samples: mean 12, longest 15/);
  find("#panel-lengths .plot").focus();
  press("ArrowRight", "ArrowRight"); // the first bar is empty
  assert.equal(text("#panel-lengths .tip"), "tokens 9 samples 1");
});

test("answers of a run of text are read, the newest first", async () => {
  await open("text_run");
  assert.match(text("#text-stage"), /^step 200, sample 0 adding ✓ right/);
  assert.match(text("#text-items"), /^✓ step 200, sample 0 .* step 200, sample 7 In the ✗ step 100, sample 0/);
  press("j", "j");
  assert.match(text("#text-stage"), /^step 100, sample 0 adding ✗ wrong/);
  click("#tab-curves");
  assert.equal(find("#minis").find("button").length, 4);
  await open("text_runs");
  assert.doesNotMatch(text("#panel-compare"), /saved answers/);
});

test("ARC votes are ranked", async () => {
  await open("arc_run");
  click("#tab-votes");
  assert.match(text("#vote-stage"), /aaaa0000, test 1 of 1 ✓ right answer in place 2/);
  assert.equal(text("#vote-stage .is-right"), "✓ right 2 votes confidence 0.2");
  assert.equal(text("#vote-filter"), "All 2 Solved 1 Failed 1");
  assert.match(text("#vote-stage"), /9 votes, 1 prediction without a grid/);
  assert.match(text("#vote-stage"), /Training pairs of the task/);
  click("#vote-filter [data-value=unsolved]");
  assert.match(text("#vote-stage"), /not among the candidates/);
  assert.match(text("#vote-stage"), /aaaa0001, test 2 of 2 ✗ right answer in place 3/);
  assert.equal(find("#vote-items").find("button").length, 1);
});
