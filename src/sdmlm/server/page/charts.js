// The drawings: two-sided histograms and a scatter plot, as SVG with a title and a description for screen readers.
// Classes differ in place and shape, and only then in colour.

import { shape } from "./dom.js";
import { isEmpty, outputAtYes } from "./sdm.js";

const BINS = 28;
const LANE = 0.09; // share of a q' axis that is set apart for q' = 0, which has no place on a log scale

// Scales: a value to its place in [0, 1], and the values that are written at the axis.

const clamp = (x) => Math.min(1, Math.max(0, x));

/** q' on a log scale from 1 on (no q' lies between 0 and 1), with a lane for 0 before it. */
export function similarityScale(values) {
  const most = Math.max(10, ...values);
  const at = (v) => (v < 1 ? LANE / 3 : clamp(LANE + ((1 - LANE) * Math.log(v)) / Math.log(most * 1.15)));
  const steps = most > 60 ? [1] : [1, 2, 5];
  const ticks = [0];
  for (let power = 1; power <= most; power *= 10) ticks.push(...steps.map((s) => s * power).filter((v) => v <= most));
  return { at, ticks: ticks.map((v) => ({ value: v, text: String(v) })) };
}

export function unitScale() {
  return { at: clamp, ticks: [0, 0.25, 0.5, 0.75, 1].map((v) => ({ value: v, text: String(v) })) };
}

/** A probability on a logit scale, wide enough for the values: most lie very near 0 or 1. */
export function logitScale(values) {
  const nines = (p) => Math.abs(Math.log10(p / (1 - p)));
  const finite = values.map(nines).filter((x) => Number.isFinite(x));
  const most = Math.min(6, Math.max(1.2, ...finite) * 1.08); // beyond six nines everything is at the edge
  const at = (p) => clamp(0.5 + (0.5 * Math.log10(p / (1 - p))) / most);
  const step = most > 4 ? 2 : 1;
  const ticks = [{ value: 0.5, text: "0.5" }];
  for (let k = 1; k <= most; k += step) {
    for (const value of [10 ** -k, 1 - 10 ** -k]) ticks.push({ value, text: value.toFixed(k) });
  }
  return { at, ticks };
}

// Parts

const anchor = (place) => (place < 0.2 ? "start" : place > 0.8 ? "end" : "middle");

function canvas(box, id, height, title, description) {
  const width = Math.max(240, box.clientWidth);
  const svg = shape(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-labelledby": `${id}-title ${id}-desc` },
    shape("title", { id: `${id}-title` }, title),
    shape("desc", { id: `${id}-desc` }, description),
  );
  box.replaceChildren(svg);
  return { svg, width };
}

const text = (x, y, kind, content, align = "middle") =>
  shape("text", { x, y, class: kind, "text-anchor": align }, content);

const line = (x1, y1, x2, y2, kind) => shape("line", { x1, y1, x2, y2, class: kind });

/** Ticks along the bottom; those that would touch the one before are left out. */
function axisBelow(svg, scale, x, y) {
  let free = -Infinity;
  for (const { value, text: label } of [...scale.ticks].sort((a, b) => a.value - b.value)) {
    const at = x(scale.at(value));
    const half = label.length * 3.4 + 4;
    if (at - half < free) continue;
    free = at + half;
    svg.append(line(at, y, at, y + 4, "axis"), text(at, y + 16, "tick", label));
  }
}

function counts(values, scale) {
  const bins = new Array(BINS).fill(0);
  for (const v of values) bins[Math.min(BINS - 1, Math.floor(scale.at(v) * BINS))] += 1;
  return bins.map((n) => n / Math.max(1, values.length));
}

/**
 * A two-sided histogram: shares of class "Yes" upwards, of class "No" downwards. `axis` names the values, `zones` are
 * the accepted intervals, `limits` the thresholds ({value, text, align}), `marker` is this answer ({value, text}).
 */
export function histogram(box, { id, title, description, axis, scale, yes, no, names, marker, limits, zones = [] }) {
  const height = 188;
  const { svg, width } = canvas(box, id, height, title, description);
  const [left, right, top, bottom] = [34, width - 8, 36, height - 40];
  const middle = (top + bottom) / 2;
  const x = (share) => left + share * (right - left);
  for (const [from, to] of zones) {
    const [start, end] = [x(scale.at(from)), x(scale.at(to))];
    svg.append(shape("rect", { x: start, y: top, width: end - start, height: bottom - top, class: "zone" }));
  }
  const [up, down] = [counts(yes, scale), counts(no, scale)];
  // Square roots, so that one crowded bin does not flatten the others to nothing.
  const room = (middle - top - 4) / Math.sqrt(Math.max(...up, ...down, 1e-9));
  const bars = (shares, sign) =>
    shares.map((share, i) => {
      const tall = room * Math.sqrt(share);
      return share && `M${x(i / BINS) + 0.5} ${middle}v${-sign * tall}h${(right - left) / BINS - 1}v${sign * tall}z`;
    });
  const path = (shares, sign) => bars(shares, sign).filter(Boolean).join("");
  svg.append(
    shape("path", { d: path(up, 1), class: "yes" }),
    shape("path", { d: path(down, -1), class: "no" }),
    line(left, middle, right, middle, "axis"),
    text(left - 6, middle - 14, "label-yes", names[1], "end"),
    text(left - 6, middle + 22, "label-no", names[0], "end"),
  );
  axisBelow(svg, scale, x, bottom);
  svg.append(text((left + right) / 2, height - 5, "axis-name", axis));
  for (const limit of limits) {
    const place = scale.at(limit.value);
    svg.append(line(x(place), top - 2, x(place), bottom, "limit"));
    svg.append(text(x(place), 12, "limit-text", limit.text, limit.align ?? anchor(place)));
  }
  if (marker) drawMarker(svg, x(scale.at(marker.value)), top, bottom, marker.text, anchor(scale.at(marker.value)));
}

function drawMarker(svg, at, top, bottom, label, align) {
  svg.append(
    line(at, top - 4, at, bottom, "marker"),
    shape("path", { d: `M${at} ${top}l-5 -8h10z`, class: "marker" }),
    text(at, top - 11, "marker-text", label, align),
  );
}

// Both as one path each: two thousand separate elements would make the slider sluggish.
const CIRCLE = (x, y) => `M${x - 3} ${y}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z`;
const TRIANGLE = (x, y) => `M${x} ${y - 3.6}l3.6 6.6h-7.2z`;

/** Calibration points, q' against the output at "Yes", the region's two corners, and this answer if there is one. */
export function scatter(box, { id, title, description, points, region, point, names }) {
  const height = Math.round(Math.min(500, Math.max(300, box.clientWidth * 0.72)));
  const { svg, width } = canvas(box, id, height, title, description);
  const [left, right, top, bottom] = [46, width - 12, 34, height - 44];
  const all = point ? [...points, point] : points;
  const [across, along] = [logitScale(all.map(outputAtYes)), similarityScale(all.map((p) => p.q_prime))];
  const x = (share) => left + share * (right - left);
  const y = (share) => bottom - share * (bottom - top);
  const place = (p) => [x(across.at(outputAtYes(p))).toFixed(1) * 1, y(along.at(p.q_prime)).toFixed(1) * 1];

  if (!isEmpty(region)) {
    const floor = y(along.at(region.q_min));
    const [no, yes] = [x(across.at(1 - region.psi[0])), x(across.at(region.psi[1]))];
    for (const [start, end, name] of [[left, no, names[0]], [yes, right, names[1]]]) {
      svg.append(
        shape("rect", { x: start, y: top, width: end - start, height: floor - top, class: "zone" }),
        shape("path", { d: `M${start} ${top}V${floor}H${end}V${top}`, class: "limit" }),
      );
      const [at, align] = start === left ? [left + 4, "start"] : [right - 4, "end"];
      svg.append(text(at, top - 6, "limit-text", `region of ${name}`, align));
    }
  }
  const marks = (label, mark) => points.filter((p) => p.label === label).map((p) => mark(...place(p))).join("");
  const many = points.length > 400 ? "many " : ""; // fainter, so that crowds show
  svg.append(
    shape("path", { d: marks(0, TRIANGLE), class: `${many}no` }),
    shape("path", { d: marks(1, CIRCLE), class: `${many}yes` }),
    shape("path", { d: `M${left} ${top}V${bottom}H${right}`, class: "axis" }),
    line(left, y(LANE * 0.72), right, y(LANE * 0.72), "lane"),
  );
  axisBelow(svg, across, x, bottom);
  for (const { value, text: label } of along.ticks) {
    svg.append(line(left - 4, y(along.at(value)), left, y(along.at(value)), "axis"));
    svg.append(text(left - 7, y(along.at(value)) + 4, "tick", label, "end"));
  }
  svg.append(text((left + right) / 2, height - 6, "axis-name", `SDM output at ${names[1]}`));
  svg.append(text(left - 7, top + 4, "axis-name", "q′", "end"));
  if (point) drawPoint(svg, ...place(point), anchor((place(point)[0] - left) / (right - left)), top);
}

function drawPoint(svg, x, y, align, top) {
  const shift = { start: 14, middle: 0, end: -14 }[align];
  const above = align === "middle" && y - 16 < top ? 26 : align === "middle" ? -14 : 4; // inside the frame
  const [width, at] = [92, { start: x + shift - 5, middle: x - 46, end: x + shift - 87 }[align]];
  svg.append(
    shape("rect", { x: at, y: y + above - 14, width, height: 20, rx: 4, class: "label-back" }), // dots stay behind it
    shape("path", { d: `M${x} ${y - 9}l9 9l-9 9l-9 -9z`, class: "here" }),
    text(x + shift, y + above, "marker-text here-text", "this answer", align),
  );
}

/** Share of the calibration documents in the region at each alpha; below it the alphas with this answer in the region. */
export function alphaCurve(box, { id, title, description, alphas, shares, accepting, chosen }) {
  const height = 140;
  const { svg, width } = canvas(box, id, height, title, description);
  const [left, right, top, bottom, strip] = [38, width - 10, 12, height - 40, height - 32];
  // By place in the grid, like the slider above it: the grid is finer towards 1.
  const x = (i) => left + (i / Math.max(1, alphas.length - 1)) * (right - left);
  const most = Math.max(0.05, ...shares);
  const y = (share) => bottom - (share / most) * (bottom - top);
  const half = (right - left) / Math.max(1, alphas.length - 1) / 2;
  const curve = shares.map((share, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(share).toFixed(1)}`).join("");
  svg.append(
    shape("path", { d: `${curve}L${x(shares.length - 1)} ${bottom}L${left} ${bottom}z`, class: "area" }),
    shape("path", { d: curve, class: "curve" }),
    shape("path", { d: `M${left} ${top}V${bottom}H${right}`, class: "axis" }),
    text(left - 6, y(most) + 4, "tick", `${Math.round(100 * most)}%`, "end"),
    text(left - 6, bottom + 4, "tick", "0%", "end"),
  );
  const bar = (start, end, kind) => shape("rect", { x: start, y: strip, width: end - start, height: 7, class: kind });
  accepting.forEach((accepts, i) => {
    if (accepts) svg.append(bar(Math.max(left, x(i) - half), Math.min(right, x(i) + half), "accepts"));
  });
  if (accepting.length) svg.append(bar(left, right, "strip"));
  alphas.forEach((alpha, i) => {
    if ([0.6, 0.7, 0.8, 0.9, 1].includes(alpha)) svg.append(text(x(i), height - 6, "tick", String(alpha)));
  });
  svg.append(line(x(chosen), top, x(chosen), strip + 8, "marker"));
}
