// The page of pipeline schedules.

import { h, replace } from "./dom.js";
import { digits, percent } from "./format.js";
import { load } from "./source.js";
import { all } from "./state.js";
import { begin, fail, page, say, settled } from "./frame.js";
import { figure, legend, numbers } from "./figure.js";
import { bar, slider } from "./controls.js";
import { tracks } from "./tracks.js";

const WORK = {
  F: ["forward", "forward"],
  B: ["collective", "backward"],
  I: ["input", "gradient of the input"],
  W: ["weight", "gradient of the weights"],
};
const NAMES = ["pp", "microbatches", "forward", "input", "weight", "transfer"];
const RANKS = [2, 3, 4, 6, 8, 12, 16];
const MICROBATCHES = [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64];
const TIMES = [0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4];

const place = h("div");
let turn = 0;

begin(async () => {
  const change = settled(() => show().catch(fail));
  replace(page,
    h("section", { class: "panel", "aria-label": "What is played" }, bar(
      slider({ name: "pp", label: "Ranks of the pipeline", values: RANKS, value: 4, change }),
      slider({ name: "microbatches", label: "Micro-batches", values: MICROBATCHES, value: 8, change }),
      slider({ name: "forward", label: "Time of a forward", values: TIMES, value: 1, format: digits, change }),
      slider({ name: "input", label: "Gradient of the input", values: TIMES, value: 1, format: digits, change }),
      slider({ name: "weight", label: "Gradient of the weights", values: TIMES, value: 1, format: digits, change }),
      slider({ name: "transfer", label: "A message", values: [0, 0.1, 0.2, 0.5, 1], value: 0, format: digits, change }),
    ), legend(Object.entries(WORK).map(([letter, [color, words]]) => [color, `${letter} ${words}`]))),
    place);
  await show();
});

async function show() {
  const mine = (turn += 1);
  const data = await load("schedules", all(...NAMES));
  if (mine !== turn) return;
  say("");
  const longest = Math.max(...data.schedules.map((each) => each.makespan));
  const sorted = [...data.schedules].sort((a, b) => a.makespan - b.makespan);
  replace(place, comparison(data, sorted), h("div", { class: "pair" }, sorted.map((each) => drawn(each, longest))),
    data.left_out.length
      ? h("section", { class: "panel" }, h("h2", {}, "Left out"), h("ul", { class: "sentences" },
        data.left_out.map((each) => h("li", {}, `${each.name}: ${each.reason}.`))))
      : null);
}

function comparison(data, sorted) {
  const rows = sorted.map((each) => [
    each.name, each.virtual, digits(each.makespan, 4), percent(each.bubble), percent(each.bubble_over_ideal),
    digits(Math.max(...each.peaks)),
  ]);
  const best = sorted[0];
  return h("section", { class: "panel" },
    h("h2", {}, `${data.pp} ranks, ${data.microbatches} micro-batches`),
    h("p", { class: "lead" }, best ? `The shortest is ${best.name}: ${digits(best.makespan, 4)} long, with a bubble of ${percent(best.bubble)}.` : ""),
    numbers({ head: ["schedule", "stages a rank", "length", "bubble", "over the ideal", "activations held"], rows }, "All schedules"));
}

function drawn(schedule, longest) {
  const peak = digits(Math.max(...schedule.peaks));
  return figure({
    title: schedule.name,
    draw: (width) => tracks({
      width, from: 0, to: longest, format: (each) => digits(each),
      rows: schedule.rows.map((row, rank) => ({
        name: `rank ${rank}`, height: 22, boxes: row.map(([work, virtual, microbatch, start, stop]) => ({
          start, stop, color: WORK[work][0], paler: virtual > 0, text: String(microbatch),
          title: `${WORK[work][1]} of micro-batch ${microbatch}, stage ${virtual + 1} of the rank, ${digits(start)} to ${digits(stop)}`,
        })),
      })),
      marks: [{ at: schedule.ideal, dashed: true, text: "" }],
    }),
    describe: () => `${digits(schedule.makespan, 4)} long; without any bubble it would be ${digits(schedule.ideal, 4)} `
      + `(dashed). Bubble ${percent(schedule.bubble)} of the time; a rank holds at most ${peak} micro-batches of activations.`
      + (schedule.virtual > 1 ? " Fainter boxes are the rank's later stages." : ""),
    table: () => ({
      head: ["rank", "order of work", "activations held"],
      rows: schedule.rows.map((row, rank) => [`rank ${rank}`,
        row.map(([work, virtual, microbatch]) => `${work}${microbatch}${"'".repeat(virtual)}`).join(" "), digits(schedule.peaks[rank])]),
    }),
  }).element;
}
