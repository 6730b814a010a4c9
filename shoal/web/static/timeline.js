// The page of the timeline.

import { h, replace } from "./dom.js";
import { bytes, percent, seconds, whole, words } from "./format.js";
import { all, get, put } from "./state.js";
import { isExport, load } from "./source.js";
import { begin, fail, page, say, settled } from "./frame.js";
import { legend, numbers } from "./figure.js";
import { NAMES, timeAt, tracks } from "./tracks.js";
import { button } from "./controls.js";

const KINDS = [
  ["forward", "forward"], ["backward", "backward"], ["optimizer", "optimizer"], ["collective", "communication"],
  ["wait", "waits for communication"], ["data_wait", "waits for data"], ["bubble", "bubble"],
  ["checkpoint", "checkpoint"], ["other", "other"],
];
const KNOWN = new Set(KINDS.map((each) => each[0]));
const NAMED = new Set(["forward", "backward", "optimizer"]);
const [COMPUTE, COMMUNICATION, COPY, HOST] = [0, 1, 2, 3];

let data = null;
let shown = { from: 0, to: 1 };
let width = 0;
let withPrediction = get("predicted", "yes") === "yes";
const place = h("div", {
  class: "viewport", tabindex: 0, role: "group",
  "aria-label": "Timeline. Left and right arrow keys move, plus and minus zoom, 0 shows all, "
    + "comma and full stop go to the step before and after.",
});
const detail = h("p", { class: "words", role: "status" });
const table = h("details", {}, h("summary", {}, "Numbers as a table"));
const controls = h("div", { class: "controls" });
const heading = h("h2");

begin(async () => {
  await fetchAnew();
  if (data === null) return;
  replace(page, controls, h("figure", {}, h("figcaption", {}, heading), place, detail,
    legend(KINDS), table));
  new ResizeObserver(([entry]) => {
    width = Math.floor(entry.contentRect.width);
    draw();
  }).observe(place);
  listen();
  table.addEventListener("toggle", () => table.open && fillTable());
});

async function fetchAnew(values = {}) {
  const asked = { ...all("run", "step", "steps", "rank"), ...values };
  const found = await load("timeline", asked);
  if (found.missing) {
    say(found.missing);
    return;
  }
  data = found;
  if (values.from === undefined) {
    shown = { from: Number(get("from")) || 0, to: Number(get("to")) || data.length };
  }
  say("");
  tools();
  draw();
}

function tools() {
  const step = h("input", {
    type: "number", id: "c-step", min: data.first, max: data.last, value: data.step, disabled: isExport && data.last === data.first,
  });
  step.addEventListener("change", () => go(Number(step.value)));
  replace(controls,
    h("div", { class: "control" }, h("label", { for: "c-step" }, `Step, ${whole(data.first)} to ${whole(data.last)}`), step),
    button("Before", () => go(data.step - 1), { "aria-label": "Step before" }),
    button("After", () => go(data.step + 1), { "aria-label": "Step after" }),
    isExport ? null : steps(),
    button("Closer", () => zoom(0.5)), button("Farther", () => zoom(2)), button("All", () => move(0, data.length)),
    data.predicted.missing ? null : button("Predicted", (event) => {
      withPrediction = !withPrediction;
      event.target.setAttribute("aria-pressed", withPrediction);
      put({ predicted: withPrediction ? null : "no" });
      draw();
    }, { "aria-pressed": withPrediction }));
  const more = data.all_ranks > data.ranks.length ? `, ranks ${data.ranks[0]} to ${data.ranks.at(-1)} of ${data.all_ranks}` : "";
  heading.textContent = `Step ${whole(data.step)}${data.steps > 1 ? ` and the next ${data.steps - 1}` : ""}: ${seconds(data.length)}${more}`;
}

function steps() {
  const select = h("select", { id: "c-steps" }, [1, 2, 5, 10, 20].map((each) => h("option", { value: each }, each)));
  select.value = String([1, 2, 5, 10, 20].find((each) => each >= data.steps) ?? 1);
  select.addEventListener("change", () => {
    put({ steps: select.value, from: null, to: null });
    fetchAnew().catch(fail);
  });
  return h("div", { class: "control" }, h("label", { for: "c-steps" }, "Steps"), select);
}

function go(step) {
  const wanted = Math.max(data.first, Math.min(data.last, step || data.last));
  put({ step: wanted, from: null, to: null });
  fetchAnew().catch(fail);
}

const closer = settled(() => {
  put({ from: shown.from <= 0 ? null : shown.from.toPrecision(7), to: shown.to >= data.length ? null : shown.to.toPrecision(7) });
  // Short spans were drawn as one: ask for those of the window.
  if (data.merged > 0 && !isExport) fetchAnew({ from: shown.from, to: shown.to }).catch(fail);
}, 250);

function move(from, to) {
  const length = Math.min(to - from, data.length);
  const begin = Math.max(0, Math.min(from, data.length - length));
  shown = { from: begin, to: begin + length };
  draw();
  closer();
}

function zoom(factor, around = (shown.from + shown.to) / 2) {
  const length = Math.max((shown.to - shown.from) * factor, 1e-6);
  const share = (around - shown.from) / (shown.to - shown.from);
  move(around - share * length, around + (1 - share) * length);
}

function draw() {
  if (!width || data === null) return;
  const isTall = data.ranks.length <= 8;
  const [compute, small] = isTall ? [22, 9] : [10, 4];
  const rows = new Map(data.ranks.map((rank) => [rank, { name: `rank ${rank}`, boxes: [], lanes: new Set() }]));
  for (const [rank, lane, kind, name, start, duration, size, algorithm] of data.spans) {
    const row = rows.get(rank);
    if (!row || start + duration < shown.from || start > shown.to) continue;
    row.boxes.push(box(rank, lane, kind, name, start, duration, size, algorithm));
    row.lanes.add(lane);
  }
  const hasPrediction = withPrediction && !data.predicted.missing;
  const lanes = new Set([...rows.values()].flatMap((row) => [...row.lanes]));
  const offsets = new Map();
  let height = hasPrediction ? small + 3 : 0;
  for (const lane of [COMPUTE, COMMUNICATION, COPY, HOST]) {
    if (lane !== COMPUTE && !lanes.has(lane)) continue;
    offsets.set(lane, height);
    height += (lane === COMPUTE ? compute : small) + 2;
  }
  for (const [rank, row] of rows) {
    row.height = height;
    for (const each of row.boxes) {
      each.top = offsets.get(each.lane) + (each.isInner ? compute * 0.3 : 0);
      each.height = each.lane === COMPUTE ? (each.isInner ? compute * 0.7 : compute) : small;
    }
    if (hasPrediction) row.boxes.push(...predictedBoxes(rank, small));
  }
  const svg = tracks({
    width, rows: [...rows.values()], from: shown.from, to: shown.to, format: seconds, gap: isTall ? 8 : 4,
    marks: data.marks.slice(1).map(([index, start]) => ({ at: start, text: `step ${index}` })),
  });
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Spans of ${data.ranks.length} ranks`);
  replace(place, svg);
  detail.textContent = told(hasPrediction);
  if (table.open) fillTable();
}

function box(rank, lane, kind, name, start, duration, size, algorithm) {
  const color = KNOWN.has(kind) ? kind : lane === COMMUNICATION ? "collective" : "other";
  const more = [size ? bytes(size) : "", algorithm].filter(Boolean).join(", ");
  return {
    lane, start, stop: start + duration, color, text: NAMED.has(kind) ? name || kind : "",
    isInner: kind === "wait",
    title: `rank ${rank}: ${words(kind)} ${name}, ${seconds(duration)} from ${seconds(start)}${more ? `, ${more}` : ""}`,
  };
}

function predictedBoxes(rank, height) {
  const played = data.predicted.stands_for[rank];
  return data.predicted.spans
    .filter((each) => each[0] === played && each[1] === COMPUTE)
    .map(([, , kind, name, start, duration]) => ({
      start, stop: start + duration, color: KNOWN.has(kind) ? kind : "other", top: 0, height, paler: false,
      title: `predicted: ${words(kind)} ${name}, ${seconds(duration)} from ${seconds(start)}`,
    }));
}

function told(hasPrediction) {
  const parts = [`Shown: ${seconds(shown.from)} to ${seconds(shown.to)}.`];
  if (data.merged > 0) parts.push(`Neighbours shorter than ${seconds(data.merged)} are drawn as one: go closer to see them.`);
  if (hasPrediction) {
    const error = data.predicted.length / (data.length / data.steps) - 1;
    parts.push(`The thin bar above each rank is the predicted step: ${seconds(data.predicted.length)}, `
      + `${percent(Math.abs(error), 0)} ${error > 0 ? "more" : "less"} than measured.`);
  } else if (data.predicted.missing) parts.push(data.predicted.missing);
  return parts.join(" ");
}

function fillTable() {
  const rows = data.spans
    .filter(([, , , , start, duration]) => start + duration >= shown.from && start <= shown.to)
    .map(([rank, , kind, name, start, duration, size]) =>
      [`rank ${rank}`, words(kind), name, seconds(start), seconds(duration), size ? bytes(size) : ""]);
  replace(table, table.firstChild, numbers({ head: ["rank", "kind", "name", "start", "duration", "bytes"], rows }, "Spans"));
}

function listen() {
  place.addEventListener("keydown", (event) => {
    const length = shown.to - shown.from;
    const actions = {
      ArrowLeft: () => move(shown.from - length / 4, shown.to - length / 4),
      ArrowRight: () => move(shown.from + length / 4, shown.to + length / 4),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => move(0, data.length),
      ",": () => go(data.step - 1), ".": () => go(data.step + 1),
    };
    if (!(event.key in actions) || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    actions[event.key]();
  });
  place.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const at = event.clientX - place.getBoundingClientRect().left;
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, timeAt(at, width, shown.from, shown.to));
  }, { passive: false });
  let drag = null;
  place.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    drag = { x: event.clientX, from: shown.from, to: shown.to };
    place.setPointerCapture(event.pointerId);
  });
  place.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const moved = ((event.clientX - drag.x) / Math.max(1, width - NAMES)) * (drag.to - drag.from);
    move(drag.from - moved, drag.to - moved);
  });
  place.addEventListener("pointerup", () => { drag = null; });
  place.addEventListener("dblclick", (event) => {
    const at = event.clientX - place.getBoundingClientRect().left;
    zoom(0.5, timeAt(at, width, shown.from, shown.to));
  });
}
