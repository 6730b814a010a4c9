// The page of collectives.

import { h, replace, s } from "./dom.js";
import { bytes, digits, rate, seconds } from "./format.js";
import { all, get, put } from "./state.js";
import { load } from "./source.js";
import { begin, fail, page, say, settled } from "./frame.js";
import { canvas, figure, legend, numbers } from "./figure.js";
import { bar, button, choice, slider } from "./controls.js";
import { chart } from "./chart.js";

const COLORS = ["forward", "collective", "backward", "optimizer", "straggler_wait", "wait", "launch"];
const MICRO = 1e-6;
const GIGA = 1e9;
const BELOW = 40;

let data = null;
let inputs = {};
let step = 0;
let timer = 0;
let turn = 0;
const animation = h("div");
const costs = h("div");

begin(async () => {
  data = await load("collectives", asked());
  const again = settled(() => fetchAnew().catch(fail));
  const fresh = () => {
    put({ algorithm: null, at: null });
    again();
  };
  const recount = () => drawCosts();
  inputs = {
    collective: choice({ name: "collective", label: "Collective", values: data.collectives, value: "all_reduce", format: dashed, change: fresh }),
    hosts: slider({ name: "hosts", label: "Hosts", values: [2, 3, 4, 5, 6, 7, 8], value: 4, change: again }),
    per_host: slider({ name: "per_host", label: "Ranks of a host", values: [1, 2, 3, 4], value: 1, change: again }),
    bytes: slider({ name: "bytes", label: "Bytes of the buffer", least: 6, most: 32, log: 2, value: 2 ** 24, format: bytes, change: recount }),
    alpha: slider({ name: "alpha", label: "Alpha: a step over the network", values: [1, 2, 5, 10, 20, 50, 100, 200, 500], value: 10, format: (each) => `${each} us`, change: recount }),
    rate: slider({ name: "rate", label: "1 / beta: rate of the network", values: [0.125, 0.5, 1.25, 3, 6, 12.5, 25, 50, 100], value: 12.5, format: (each) => `${each} GB/s`, change: recount }),
    alpha_inside: slider({ name: "alpha_inside", label: "Alpha inside a host", values: [0.2, 0.5, 1, 2, 5, 10, 20], value: 1, format: (each) => `${each} us`, change: recount }),
    rate_inside: slider({ name: "rate_inside", label: "Rate inside a host", values: [2, 5, 10, 20, 50, 100, 200, 450], value: 50, format: (each) => `${each} GB/s`, change: recount }),
  };
  replace(page, h("section", { class: "panel", "aria-label": "What is modelled" }, bar(...Object.values(inputs))), animation, costs);
  drawAll();
  say("");
});

function dashed(name) {
  return name.replaceAll("_", "-");
}

function asked() {
  return all("collective", "algorithm", "hosts", "per_host");
}

async function fetchAnew() {
  const mine = (turn += 1);
  const found = await load("collectives", asked());
  if (mine !== turn) return;
  data = found;
  step = 0;
  drawAll();
}

function drawAll() {
  drawAnimation();
  drawCosts();
}

/** Return the seconds of an algorithm by the formula of the cost model. */
function cost(algorithm, size) {
  const levels = {
    network: [inputs.alpha.read() * MICRO, 1 / (inputs.rate.read() * GIGA)],
    "shared-memory": [inputs.alpha_inside.read() * MICRO, 1 / (inputs.rate_inside.read() * GIGA)],
  };
  return algorithm.terms.reduce((sum, term) => {
    const [alpha, beta] = levels[term.level];
    return sum + alpha * term.steps + beta * term.path * size;
  }, 0);
}

function drawCosts() {
  const size = inputs.bytes.read();
  const sorted = [...data.algorithms].sort((a, b) => cost(a, size) - cost(b, size));
  const colorOf = (name) => COLORS[data.algorithms.findIndex((each) => each.name === name) % COLORS.length];
  const sizes = Array.from({ length: 53 }, (_, at) => 2 ** (6 + at / 2));
  const lines = data.algorithms.map((each) => ({
    name: each.name, color: colorOf(each.name), points: sizes.map((one) => [one, cost(each, one)]),
  }));
  const rows = sorted.map((each) => [
    button(each.name, () => pick(each.name), { "aria-pressed": each.name === data.algorithm }),
    seconds(cost(each, size)), each.terms.map((term) => term.steps).join(" + "),
    each.terms.map((term) => digits(term.path)).join(" + "), rate(size / cost(each, size)),
  ]);
  const table = numbers({ head: ["algorithm", "time", "steps", "bytes on the path / S", "algbw"], rows }, "Costs");
  const drawing = figure({
    title: "Time against bytes",
    draw: (width) => h("div", {}, chart({
      width, height: 300, series: lines, label: "Time against bytes", marks: [{ at: size, text: bytes(size) }],
      x: { label: "bytes", format: bytes, log: true, base: 2 }, y: { format: seconds, log: true },
    }), legend(lines.map((each) => [each.color, each.name]))),
    describe: () => `With ${bytes(size)}, ${sorted[0].name} is the quickest: ${seconds(cost(sorted[0], size))}. `
      + "The time is the sum of alpha times the steps and beta times the bytes on the path.",
  });
  replace(costs, h("section", { class: "panel" }, h("h2", {}, `What ${bytes(size)} cost`), table), drawing.element);
}

function pick(name) {
  put({ algorithm: name, at: null });
  fetchAnew().catch(fail);
}

function drawAnimation() {
  stop();
  const { motion } = data;
  const states = played(motion);
  const last = motion.steps.length;
  const label = h("output", { role: "status" });
  const made = figure({
    title: `${dashed(data.collective)}, ${data.algorithm}: step by step`,
    draw: (width) => moment(width, motion, states, step),
    describe: () => sentence(motion, step),
  });
  const show = (wanted) => {
    step = Math.max(0, Math.min(last, wanted));
    position.value = step;
    position.setAttribute("aria-valuetext", `after ${step} of ${last} steps`);
    put({ at: step });
    label.textContent = `${step} of ${last} steps done`;
    made.update();
  };
  const position = h("input", { type: "range", min: 0, max: last, step: 1, value: step, "aria-label": "Steps done" });
  position.addEventListener("input", () => {
    stop();
    show(Number(position.value));
  });
  const play = button("Play", () => {
    if (timer) return stop(play);
    if (step >= last) show(0);
    play.textContent = "Stop";
    timer = setInterval(() => {
      show(step + 1);
      if (step >= last) stop(play);
    }, Math.max(250, Math.min(1200, 9000 / Math.max(1, last))));
  });
  const tools = h("div", { class: "controls" }, play, button("Back", () => show(step - 1)), button("Step", () => show(step + 1)), position, label);
  made.element.insertBefore(tools, made.element.children[1]);
  replace(animation, made.element);
  show(Math.min(Number(get("at", "1")) || 0, last));
}

function stop(play) {
  clearInterval(timer);
  timer = 0;
  const name = play ?? animation.querySelector("button");
  if (name) name.textContent = "Play";
}

/** Return what each rank holds of each slice, at first and after each step, as sets of ranks. */
function played(motion) {
  const states = [motion.start.map((slices) => slices.map((held) => new Set(held)))];
  for (const each of motion.steps) {
    const before = states.at(-1);
    const after = before.map((slices) => slices.map((held) => new Set(held)));
    for (const [sender, receiver, slices] of each.messages) {
      for (const index of slices) for (const rank of before[sender][index]) after[receiver][index].add(rank);
    }
    states.push(after);
  }
  return states;
}

function nameOf(motion, rank) {
  if (!motion.aggregator) return `rank ${rank}`;
  return rank === motion.ranks - 1 ? "switch" : `host ${rank}`;
}

/** Return the drawing: ranks on a ring, each with its slices; arrows are the messages of the next step. */
function moment(width, motion, states, at) {
  const height = Math.min(520, Math.max(300, width * 0.62)) + (motion.per_host ? 60 : 0);
  const svg = canvas(width, height);
  const state = states[at];
  const cell = Math.max(3.5, Math.min(22, 150 / motion.slices));
  const boxWidth = Math.max(44, cell * motion.slices);
  const [radiusX, radiusY] = [(width - boxWidth) / 2 - 12, height / 2 - 42];
  const count = motion.aggregator ? motion.ranks - 1 : motion.ranks;
  const perHost = motion.per_host || 1;
  const places = state.map((_, rank) => {
    if (motion.aggregator && rank === motion.ranks - 1) return [width / 2, height / 2];
    // Hosts stand on a ring; the ranks of a host stand one below another.
    const angle = (Math.floor(rank / perHost) / Math.ceil(count / perHost)) * 2 * Math.PI - Math.PI / 2;
    const below = ((rank % perHost) - (perHost - 1) / 2) * BELOW;
    return [width / 2 + radiusX * Math.cos(angle), height / 2 + (radiusY - ((perHost - 1) / 2) * BELOW) * Math.sin(angle) + below];
  });
  if (motion.per_host) {
    for (let first = 0; first < count; first += motion.per_host) {
      const inside = places.slice(first, first + motion.per_host);
      const [xs, ys] = [inside.map((each) => each[0]), inside.map((each) => each[1])];
      svg.append(s("rect", {
        x: Math.min(...xs) - boxWidth / 2 - 8, y: Math.min(...ys) - 28, class: "host", rx: 8,
        width: Math.max(...xs) - Math.min(...xs) + boxWidth + 16, height: Math.max(...ys) - Math.min(...ys) + 48,
      }));
    }
  }
  for (const [sender, receiver] of motion.steps[at]?.messages ?? []) svg.append(...arrow(places[sender], places[receiver], width, height));
  state.forEach((slices, rank) => {
    const [x, y] = places[rank];
    svg.append(s("text", { x, y: y - 13, class: "tick middle" }, nameOf(motion, rank)));
    const left = x - (cell * motion.slices) / 2;
    slices.forEach((held, index) => {
      const share = held.size / motion.whole;
      svg.append(
        s("rect", { x: left + index * cell, y: y - 7, width: cell, height: 15, class: "cell c-surface" }),
        s("rect", { x: left + index * cell, y: y - 7, width: cell, height: 15, class: "moving c-forward", "fill-opacity": share === 1 ? 1 : share && 0.18 + 0.5 * share },
          s("title", {}, `${nameOf(motion, rank)}, slice ${index}: data of ${held.size} of ${motion.whole} ranks`)),
      );
    });
  });
  return svg;
}

function arrow([x1, y1], [x2, y2], width, height) {
  // Arrows bend towards the middle, and begin and end beside the boxes.
  const bend = 0.18;
  const [mx, my] = [(x1 + x2) / 2 + (width / 2 - (x1 + x2) / 2) * bend, (y1 + y2) / 2 + (height / 2 - (y1 + y2) / 2) * bend];
  const near = ([ax, ay], [bx, by], gap) => {
    const length = Math.hypot(bx - ax, by - ay) || 1;
    return [ax + ((bx - ax) / length) * gap, ay + ((by - ay) / length) * gap];
  };
  const [begin, end] = [near([x1, y1], [mx, my], 24), near([x2, y2], [mx, my], 26)];
  const angle = Math.atan2(end[1] - my, end[0] - mx);
  const tip = (turned, size) => `${end[0] + size * Math.cos(angle + turned)} ${end[1] + size * Math.sin(angle + turned)}`;
  return [
    s("path", { d: `M${begin.join(" ")}Q${mx} ${my} ${end.join(" ")}`, class: "arrow" }),
    s("path", { d: `M${tip(0, 4)}L${tip(2.5, 7)}L${tip(-2.5, 7)}Z`, class: "head" }),
  ];
}

function sentence(motion, at) {
  if (at >= motion.steps.length) return "Done: every rank holds what it has to. Full colour is data of all ranks.";
  const each = motion.steps[at];
  const shown = each.messages.slice(0, 6).map(([sender, receiver, slices]) =>
    `${nameOf(motion, sender)} to ${nameOf(motion, receiver)}${motion.slices > 1 ? ` slice ${slices.slice(0, 4).join(", ")}${slices.length > 4 ? " ..." : ""}` : ""}`);
  const more = each.messages.length > 6 ? `, and ${each.messages.length - 6} more messages` : "";
  return `Next is step ${at + 1}, "${each.label}": ${shown.join("; ")}${more}. The fuller the colour, the more ranks' data a slice holds.`;
}
