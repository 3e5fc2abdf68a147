// The tiles of recent activity, and latencies by tenant.
import { Chart, span } from "./chart.js";
import { byId, el, keyed, text } from "./elements.js";
import { duration, milliseconds, percent, short } from "./words.js";

const POINTS_MAX = 310;
// Columns of a point, see gateway/page/history.py.
const AT = 0,
  TOKENS = 1,
  RUNNING = 3,
  WAITING = 4,
  HELD = 5,
  CACHED = 6,
  FIRST = 7,
  BETWEEN = 8;

const pair = (value) => (value ? [milliseconds(value[0]), `p99 ${milliseconds(value[1])}`] : ["–", ""]);

export class Lines {
  constructor() {
    this.points = [];
    this.tiles = [
      this.tile("Tokens per second", ["one"], (p) => [p[TOKENS]], true),
      this.tile("Requests", ["one", "two"], (p) => [p[RUNNING], p[WAITING]], true),
      this.tile(
        "Blocks in use",
        ["one", "two"],
        (p) => [p[HELD], p[HELD] === null ? null : p[HELD] + p[CACHED]],
        true,
        1,
      ),
      this.tile("To the first token", ["one", "two"], (p) => [p[FIRST]?.[0] ?? null, p[FIRST]?.[1] ?? null]),
      this.tile("Between tokens", ["one", "two"], (p) => [p[BETWEEN]?.[0] ?? null, p[BETWEEN]?.[1] ?? null]),
      { name: "Prefix cache hits", node: el("div", { class: "tile" }) },
    ];
    for (const tile of this.tiles) {
      tile.value = el("b", {}, "–");
      tile.told = el("span", { class: "soft" });
      const chart = tile.chart ? [tile.chart.svg] : [];
      tile.node.append(
        el("span", { class: "soft label" }, tile.name),
        el("div", {}, tile.value, " ", tile.told),
        ...chart,
      );
      byId("tiles").append(tile.node);
    }
    this.charts = [
      ["To the first token", FIRST],
      ["Between tokens", BETWEEN],
    ].map(([name, column]) => this.large(name, column));
    this.body = el("tbody", {});
    const head = ["tenant", "requests", "first token", "p99", "between", "p99", "whole", "p99"];
    const table = el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ...head.map((cell) => el("th", { scope: "col" }, cell)))),
      this.body,
    );
    this.none = el("p", { class: "empty" }, "No request has ended in the last minute.");
    const region = { class: "scroll", hidden: true, tabindex: "0", role: "region", "aria-label": "Latency by tenant" };
    this.table = el("div", region, table);
    byId("latency").append(
      el("div", { class: "charts" }, ...this.charts.map((chart) => chart.node)),
      this.none,
      this.table,
    );
  }

  tile(name, lines, of, area = false, floor = 0) {
    return {
      name,
      of,
      floor,
      node: el("div", { class: "tile" }),
      chart: new Chart(lines, { area, label: `${name} over the last minutes` }),
    };
  }

  large(name, column) {
    const chart = new Chart(["one", "two"], {
      width: 600,
      height: 110,
      label: `${name}: median and 99th percentile over the last minutes`,
    });
    const top = el("span", { class: "soft" });
    const words = el("span", {}, el("i", { class: "key one" }), "median ", el("i", { class: "key two" }), "p99");
    const from = el("span", {});
    const foot = el("div", { class: "foot soft" }, from, el("span", {}, "now"));
    return {
      chart,
      top,
      from,
      column,
      node: el("figure", {}, el("figcaption", {}, el("b", {}, name), words, top), chart.svg, foot),
    };
  }

  take(points) {
    this.points.push(...points);
    this.points.splice(0, Math.max(0, this.points.length - POINTS_MAX));
    if (!this.points.length) return;
    const times = this.points.map((point) => point[AT]);
    for (const { chart, of, floor } of this.tiles) {
      if (!chart) continue;
      const values = this.points.map(of);
      chart.draw(
        times,
        values[0].map((_, line) => values.map((each) => each[line])),
        floor,
      );
    }
    for (const { chart, top, from, column } of this.charts) {
      text(from, `${duration(span(times) / 1000)} ago`);
      const lines = [0, 1].map((at) => this.points.map((point) => point[column]?.[at] ?? null));
      const most = chart.draw(times, lines);
      text(top, most ? `up to ${milliseconds(most)}` : "");
    }
  }

  now(now) {
    const [tokens, requests, blocks] = this.tiles;
    const known = now.running !== undefined;
    this.set(
      tokens,
      short(now.tokens_per_s),
      known && now.steps_per_s !== null ? `${short(now.steps_per_s)} steps/s` : "",
    );
    this.set(requests, known ? `${short(now.running)}` : "–", known ? `running, ${short(now.waiting)} waiting` : "");
    this.set(
      blocks,
      known && now.total ? percent(now.referenced / now.total) : "–",
      known && now.total ? `${percent(now.cached / now.total)} cached` : "",
    );
  }

  totals(totals) {
    const share = totals.prompt_tokens ? totals.cached_tokens / totals.prompt_tokens : null;
    this.set(
      this.tiles[5],
      share === null ? "–" : percent(share),
      share === null ? "" : `of ${short(totals.prompt_tokens)} tokens`,
    );
  }

  latency(rows) {
    const all = rows[0];
    this.set(this.tiles[3], ...pair(all.first_ms));
    this.set(this.tiles[4], ...pair(all.between_ms));
    this.none.hidden = all.count > 0;
    this.table.hidden = all.count === 0;
    const shown = rows.length === 2 ? rows.slice(1) : rows; // a single tenant equals the total
    const cells = (row) => [
      row.tenant || "all",
      short(row.count),
      ...[row.first_ms, row.between_ms, row.whole_ms].flatMap((each) => (each ? each.map(milliseconds) : ["–", "–"])),
    ];
    keyed(
      this.body,
      all.count ? shown : [],
      (row) => row.tenant,
      (row) => el("tr", {}, ...cells(row).map((_, at) => el("td", {}, at ? "" : el("span", { class: "name" })))),
      (node, row) => {
        cells(row).forEach((cell, at) => text(at ? node.children[at] : node.querySelector(".name"), cell));
        node.querySelector(".name").title = row.tenant;
      },
    );
  }

  set(tile, value, told) {
    text(tile.value, value);
    text(tile.told, told);
  }
}
