// Cells whose colour is a number; the colours get lighter evenly, also for colour-blind people.

import { s } from "./dom.js";
import { canvas } from "./figure.js";

const LEFT = 76;
const STOPS = [[0, 32, 76], [39, 62, 108], [85, 91, 108], [124, 123, 120], [166, 157, 117], [213, 193, 99], [255, 234, 70]];

/** Return a colour for a share from 0 to 1: the map called cividis. */
function cividis(share) {
  const at = Math.max(0, Math.min(1, share)) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(at));
  const mixed = STOPS[low].map((each, number) => Math.round(each + (STOPS[low + 1][number] - each) * (at - low)));
  return `rgb(${mixed.join(",")})`;
}

/** Return the map: `rows` by name, `columns` by name, `values` by row and column; null leaves a cell empty. */
export function heatMap({ width, rows, columns, values, format, most }) {
  const tall = rows.length > 24 ? 9 : rows.length > 8 ? 14 : 24;
  const height = rows.length * tall + 46;
  const svg = canvas(width, height);
  const wide = (width - LEFT - 4) / columns.length;
  rows.forEach((name, row) => {
    if (rows.length <= 24 || row % 8 === 0) {
      svg.append(s("text", { x: LEFT - 8, y: row * tall + Math.min(tall, 12) / 2 + 4, class: "tick end" }, name));
    }
    columns.forEach((column, at) => {
      const value = values[row][at];
      if (value === null) return;
      svg.append(s("rect", {
        x: LEFT + at * wide, y: row * tall, width: Math.max(wide - 1, 0.5), height: tall - 1,
        fill: cividis(most > 0 ? value / most : 0),
      }, s("title", {}, `${name}, step ${column}: ${format(value)}`)));
    });
  });
  const every = Math.max(1, Math.ceil((columns.length * 44) / (width - LEFT)));
  columns.forEach((column, at) => {
    if (at % every) return;
    svg.append(s("text", { x: LEFT + (at + 0.5) * wide, y: rows.length * tall + 14, class: "tick middle" }, column));
  });
  svg.append(s("text", { x: LEFT - 8, y: rows.length * tall + 14, class: "tick end" }, "step"));
  const key = Math.min(180, width / 3);
  for (let at = 0; at < 24; at += 1) {
    svg.append(s("rect", { x: LEFT + (at * key) / 24, y: height - 16, width: key / 24 + 0.5, height: 10, fill: cividis(at / 23) }));
  }
  svg.append(
    s("text", { x: LEFT - 8, y: height - 7, class: "tick end" }, "0"),
    s("text", { x: LEFT + key + 8, y: height - 7, class: "tick" }, format(most)),
  );
  return svg;
}
