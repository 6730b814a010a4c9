// Boxes on rows over an axis of time.

import { s } from "./dom.js";
import { canvas } from "./figure.js";
import { steps } from "./chart.js";

const [RIGHT, AXIS] = [8, 24];

/** The width of the names at the left of the rows. */
export const NAMES = 64;

/**
 * Return the drawing: `rows` are { name, height, boxes: [{ start, stop, color, text, title, top, height }] }.
 *
 * Times are those of `from` and `to`; `marks` are vertical lines { at, text, color }.
 */
export function tracks({ width, rows, from, to, format, marks = [], gap = 3 }) {
  const height = rows.reduce((sum, row) => sum + row.height + gap, 0) + AXIS;
  const svg = canvas(width, height);
  const inner = width - NAMES - RIGHT;
  const place = (time) => NAMES + ((time - from) / (to - from || 1)) * inner;
  for (const tick of steps(from, to, Math.max(2, Math.floor(width / 120)))) {
    svg.append(
      s("line", { x1: place(tick), x2: place(tick), y1: 0, y2: height - AXIS, class: "grid" }),
      s("text", { x: place(tick), y: height - 8, class: "tick middle" }, format(tick)),
    );
  }
  let top = 0;
  for (const row of rows) {
    svg.append(s("text", { x: NAMES - 8, y: top + row.height / 2 + 4, class: "tick end" }, row.name));
    svg.append(s("line", { x1: NAMES, x2: width - RIGHT, y1: top + row.height + gap / 2, y2: top + row.height + gap / 2, class: "row" }));
    for (const box of row.boxes) {
      const left = Math.max(NAMES, place(box.start));
      const right = Math.min(width - RIGHT, place(box.stop));
      if (right <= left && (box.stop < from || box.start > to)) continue;
      const [y, tall] = [top + (box.top ?? 0), box.height ?? row.height];
      const wide = Math.max(right - left, 0.8);
      svg.append(s("rect", {
        x: left, y, width: wide, height: tall, class: `box c-${box.color} ${box.paler ? "paler" : ""}`,
        rx: wide > 6 ? 1.5 : 0,
      }, box.title ? s("title", {}, box.title) : null));
      const [free, room] = box.text && tall >= 10 ? uncovered(left, left + wide, row.boxes.filter((each) => hides(each, box, row)), place) : [0, 0];
      if (box.text && room > box.text.length * 6.2 + 3) {
        svg.append(s("text", {
          x: free + room / 2, y: y + tall / 2 + 3.8, class: `inside middle t-${box.color} ${box.paler ? "paler" : ""}`,
        }, box.text));
      }
    }
    top += row.height + gap;
  }
  for (const mark of marks) {
    if (mark.at < from || mark.at > to) continue;
    svg.append(s("line", { x1: place(mark.at), x2: place(mark.at), y1: 0, y2: height - AXIS, class: `mark ${mark.dashed ? "dashed" : ""}` }));
    if (mark.text) svg.append(s("text", { x: place(mark.at) + 4, y: 10, class: "tick" }, mark.text));
  }
  return svg;
}

const LETTERS = 6; // from the middle of a text to its upper or lower end

/** Return whether a box that is drawn later lies over the text of another one. */
function hides(each, box, row) {
  if (row.boxes.indexOf(each) <= row.boxes.indexOf(box) || each.stop <= box.start || each.start >= box.stop) return false;
  const middle = (box.top ?? 0) + (box.height ?? row.height) / 2;
  const top = each.top ?? 0;
  return top < middle + LETTERS && top + (each.height ?? row.height) > middle - LETTERS;
}

/** Return where the widest part of a box begins that no other covers, and its width. */
function uncovered(left, right, over, place) {
  let [best, room, from] = [left, 0, left];
  for (const each of [...over].sort((one, other) => one.start - other.start)) {
    if (place(each.start) - from > room) [best, room] = [from, place(each.start) - from];
    from = Math.max(from, place(each.stop));
  }
  return right - from > room ? [from, right - from] : [best, room];
}

/** Return the time at a place of a drawing that is so wide. */
export function timeAt(place, width, from, to) {
  return from + ((place - NAMES) / (width - NAMES - RIGHT)) * (to - from);
}
