// SVG line charts of the last minutes.

const SVG = "http://www.w3.org/2000/svg";
const SPAN_MS_MIN = 60_000;
const SPAN_MS_MAX = 600_000;
const GAP_MS = 7000; // a larger gap between points had no viewers

function node(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  return made;
}

// The displayed time span: all available data, within limits.
export const span = (times) => Math.min(SPAN_MS_MAX, Math.max(SPAN_MS_MIN, times.at(-1) - times[0]));

// The next round number.
export function round(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  // lines: classes of the lines, the last one on top; area: whether to fill below the first.
  constructor(lines, { width = 200, height = 40, area = false, label = "" } = {}) {
    this.width = width;
    this.height = height;
    this.svg = node("svg", {
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": label,
      class: "chart",
    });
    this.filled = area ? node("path", { class: `fill ${lines[0]}` }) : null;
    this.paths = lines.map((name) => node("path", { class: `line ${name}`, "vector-effect": "non-scaling-stroke" }));
    this.svg.append(...(this.filled ? [this.filled] : []), ...this.paths);
  }

  // times: [n] ms; series: [n] numbers or null for each line. Returns the top of the scale, 0 without data.
  draw(times, series, floor = 0) {
    const endMs = times.at(-1);
    const spanMs = span(times);
    let most = floor;
    for (const values of series) for (const value of values) if (value !== null && value > most) most = value;
    const top = round(most);
    const x = (ms) => this.width * (1 - (endMs - ms) / spanMs);
    const y = (value) => this.height - 1 - (this.height - 2) * (value / top);
    series.forEach((values, at) => {
      let path = "";
      let fill = "";
      let before = null;
      values.forEach((value, i) => {
        if (value === null || endMs - times[i] > spanMs) {
          before = null;
          return;
        }
        const joined = before !== null && times[i] - before < GAP_MS;
        const point = `${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}`;
        if (at === 0 && this.filled) {
          if (!joined) fill += `${fill && `V${this.height}Z`}M${x(times[i]).toFixed(1)} ${this.height}`;
          fill += `L${point}`;
          const next = times[i + 1];
          if (next === undefined || values[i + 1] === null || next - times[i] >= GAP_MS)
            fill += `L${x(times[i]).toFixed(1)} ${this.height}Z`;
        }
        path += `${joined ? "L" : "M"}${point}`;
        before = times[i];
      });
      this.paths[at].setAttribute("d", path);
      if (at === 0 && this.filled) this.filled.setAttribute("d", fill.replaceAll(`V${this.height}Z`, ""));
    });
    return most > 0 ? top : 0;
  }
}
