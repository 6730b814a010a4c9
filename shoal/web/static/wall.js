// The page of the communication wall.

import { h, replace } from "./dom.js";
import { bytes, count, percent, seconds, whole } from "./format.js";
import { all } from "./state.js";
import { load } from "./source.js";
import { begin, fail, page, say } from "./frame.js";
import { figure, legend, numbers } from "./figure.js";
import { asking, partsOf, shares } from "./asking.js";
import { choice } from "./controls.js";
import { chart } from "./chart.js";
import { stacked } from "./bars.js";

const NAMES = ["model", "cluster", "devices", "batch", "sequence", "grow"];
const place = h("div");
let turn = 0;

begin(async () => {
  say("Choosing a Plan for each number of devices.");
  const data = await load("wall", all(...NAMES));
  const change = () => show().catch(fail);
  const grow = choice({
    name: "grow", label: "The batch", values: ["no", "yes"], value: "no", change,
    format: (each) => (each === "yes" ? "grows with the devices" : "is the same for all"),
  });
  replace(page, asking(data, change, [grow]), place);
  draw(data);
});

async function show() {
  const mine = (turn += 1);
  say("Choosing a Plan for each number of devices.");
  replace(place);
  const data = await load("wall", all(...NAMES));
  if (mine === turn) draw(data);
}

function draw(data) {
  say("");
  replace(place,
    h("section", { class: "panel" }, h("h2", {}, "The answer"), h("p", {}, answer(data))),
    h("div", { class: "pair" }, times(data).element, efficiency(data).element),
    split(data).element, table(data));
}

function answer(data) {
  const last = data.points.at(-1);
  const told = [data.pays_to === null
    ? `Doubling the devices pays up to ${whole(last.devices)}, the largest number here.`
    : `Doubling the devices stops paying at ${whole(data.pays_to)}: from there on it gives less than 1.5 times the tokens/s.`];
  if (data.wall !== null) told.push(`The wall is at ${whole(data.wall)}: more devices do not train more tokens a second.`);
  told.push(`On ${whole(last.devices)} devices, ${percent(last.communication)} of a step is exposed communication.`);
  if (data.unfit.length) told.push(`No legal Plan fits in memory on ${data.unfit.join(", ")} devices.`);
  return told.join(" ");
}

function marks(data) {
  return [
    ...(data.pays_to === null ? [] : [{ at: data.pays_to, text: "stops paying" }]),
    ...(data.wall === null || data.wall === data.pays_to ? [] : [{ at: data.wall, text: "wall" }]),
  ];
}

function times(data) {
  const lines = [
    { name: "step", color: "forward", points: data.points.map((each) => [each.devices, each.seconds]), dots: true },
    { name: "by Amdahl's law", color: "other", points: data.points.map((each) => [each.devices, each.amdahl]), dashed: true },
  ];
  return figure({
    title: "Step time",
    draw: (width) => h("div", {}, chart({
      width, series: lines, marks: marks(data), label: "Step time against devices",
      x: { label: "devices", format: whole, log: true, base: 2 }, y: { format: seconds, log: true },
    }), legend(lines.map((each) => [each.color, each.name]))),
    describe: () => {
      const [first, last] = [data.points[0], data.points.at(-1)];
      return `From ${seconds(first.seconds)} on ${whole(first.devices)} devices to ${seconds(last.seconds)} on ${whole(last.devices)}.`;
    },
  });
}

function efficiency(data) {
  const lines = [
    { name: "efficiency", color: "backward", points: data.points.map((each) => [each.devices, each.efficiency]), dots: true },
    { name: "exposed communication", color: "collective", points: data.points.map((each) => [each.devices, each.communication]), dots: true },
    { name: "MFU", color: "optimizer", points: data.points.map((each) => [each.devices, each.mfu]), dots: true },
  ];
  return figure({
    title: "Efficiency, and the share of communication",
    draw: (width) => h("div", {}, chart({
      width, series: lines, marks: marks(data), label: "Efficiency against devices",
      x: { label: "devices", format: whole, log: true, base: 2 }, y: { format: (each) => percent(each, 0) },
    }), legend(lines.map((each) => [each.color, each.name]))),
    describe: () => "Efficiency is tokens/s of a device over those on the fewest devices.",
  });
}

function split(data) {
  return figure({
    title: "What the steps are made of",
    note: "Each bar is a whole step, so that shares can be compared.",
    draw: (width) => h("div", {}, stacked({
      width, format: (each) => percent(each), most: 1,
      rows: data.points.map((each) => ({
        name: whole(each.devices),
        parts: partsOf(each.parts).map(([color, part, name]) => [color, part / Object.values(each.parts).reduce((a, b) => a + b, 0), name]),
      })),
    }), legend(shares(data.points))),
    describe: () => data.points.map((each) => `${whole(each.devices)} devices: ${percent(each.communication)} exposed communication`).join("; "),
  });
}

function table(data) {
  const rows = data.points.map((each) => [whole(each.devices), seconds(each.seconds), count(each.tokens_per_second), percent(each.efficiency),
    percent(each.communication), percent(each.bubble), percent(each.mfu), bytes(each.memory), h("code", {}, each.plan)]);
  return h("section", { class: "panel" }, h("h2", {}, "The Plans"),
    numbers({ head: ["devices", "step", "tokens/s", "efficiency", "exposed", "bubble", "MFU", "memory", "Plan"], rows }, "Plans by devices"));
}
