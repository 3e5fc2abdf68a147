// Pools as maps on a canvas, one cell per block, with a readout for pointer and keyboard.
import { Blocks, CACHED, FREE, HELD, KINDS, QUARANTINED, STATES } from "./blocks.js";
import { AGE_COLOURS, KIND_COLOURS, TENANT_COLOURS, colour, onScheme, pixel, shade, tenantShade } from "./colours.js";
import { byId, el, keyed, part, swatch, text } from "./elements.js";
import { poolText } from "./pool_text.js";
import { duration } from "./words.js";

const HEIGHT = 300; // of all maps together, approximately, in CSS pixels
const CELL_MAX = 14;
const GAP_FROM = 4; // from this cell size on, draw lines between cells
const DWELL_MS = 250;
const LATER_MAX = 20; // pending frames before a full redraw
const AGES_MS = 5000; // interval of redrawing colours by age
const AGE_WORDS = ["under 1 s", "10 s", "1 min", "10 min", "1 h", "more"];

export class Pools {
  constructor(server, tenants) {
    this.server = server;
    this.tenants = tenants;
    this.blocks = new Blocks();
    this.rows = [];
    this.maps = new Map();
    this.mode = "state";
    this.drawMs = [];
    byId("colouring").addEventListener("change", (event) => {
      this.mode = event.target.value;
      this.all();
    });
    onScheme(() => this.all());
    new ResizeObserver(() => this.all()).observe(byId("pools"));
    setInterval(() => this.mode === "age" && this.all(), AGES_MS);
    this.legend();
  }

  async take(frame) {
    const ids = await this.blocks.take(frame);
    if (ids === undefined) return;
    if (ids === null) this.all();
    else this.later(ids);
  }

  show(rows) {
    const shape = (pools) => JSON.stringify(pools.map((pool) => [pool.worker, pool.base, pool.blocks]));
    const same = shape(rows) === shape(this.rows);
    this.rows = rows;
    const parent = byId("pools");
    keyed(
      parent,
      rows,
      (pool) => `${pool.worker} ${pool.base}`,
      (pool) => this.make(pool),
      (node, pool) => this.count(node, pool),
    );
    parent.classList.toggle("many", rows.length > 1);
    if (!rows.length && !parent.querySelector(".empty")) {
      parent.append(el("p", { class: "empty" }, "No worker is ready yet."));
    } else if (rows.length) parent.querySelector(".empty")?.remove();
    for (const key of this.maps.keys()) if (!parent.keyed.has(key)) this.maps.delete(key);
    if (!same) this.all();
  }

  make(pool) {
    const map = new PoolMap(this, pool);
    this.maps.set(`${pool.worker} ${pool.base}`, map);
    const bar = el("div", { class: "bar thin", "aria-hidden": "true" });
    const node = el(
      "div",
      { class: "pool" },
      el("div", { class: "head" }, el("b", {}, pool.worker), el("span", { class: "soft told" })),
      bar,
      map.canvas,
      map.readout,
    );
    return node;
  }

  count(node, pool) {
    text(node.querySelector(".told"), poolText(pool));
    const bar = node.querySelector(".bar");
    bar.replaceChildren(
      part(pool.referenced, shade("held"), `held ${pool.referenced}`),
      part(pool.quarantined, shade("quarantined"), `quarantined ${pool.quarantined}`),
      part(pool.cached, shade("cached"), `cached ${pool.cached}`),
      part(pool.free, shade("free"), `free ${pool.free}`),
    );
    this.maps.get(`${pool.worker} ${pool.base}`)?.label(pool);
  }

  legend() {
    const items = {
      state: STATES.map((state) => [shade(state), state]),
      tenant: [
        ...this.tenants
          .named()
          .slice(0, TENANT_COLOURS)
          .map(({ number, tenant }) => [tenantShade(number), tenant]),
        [shade("free"), "free"],
      ],
      age: [...AGE_WORDS.map((words, step) => [shade(`age-${step}`), words]), [shade("free"), "free"]],
      kind: [...KIND_COLOURS.map((name, kind) => [shade(name), KINDS[kind]]), [shade("free"), "free"]],
    }[this.mode];
    const said = {
      state: "shared: several references; cached: unreferenced, kept for requests with the same prefix; quarantined: unreferenced, a step may still use it",
      tenant: "paler: unreferenced (cached or quarantined)",
      age: "age of a block's content, as far as observed",
      kind: "what a block holds; paler: unreferenced (cached or quarantined)",
    }[this.mode];
    byId("legend").replaceChildren(
      ...items.map(([background, words]) => el("span", {}, swatch(background), words)),
      el("span", { class: "soft" }, said),
    );
  }

  // The colour of each kind of cell, for ImageData.
  palette() {
    if (this.mode === "state") return STATES.map((state) => pixel(state));
    if (this.mode === "age") return [...Array(AGE_COLOURS).keys()].map((step) => pixel(`age-${step}`));
    if (this.mode === "kind") {
      return [...KIND_COLOURS.map((name) => pixel(name)), ...KIND_COLOURS.map((name) => pixel(name, "card", 0.6))];
    }
    const shades = [...Array(TENANT_COLOURS).keys()];
    return [...shades.map((at) => pixel(`tenant-${at}`)), ...shades.map((at) => pixel(`tenant-${at}`, "card", 0.6))];
  }

  kind(block) {
    const state = this.blocks.state(block);
    const unreferenced = state === CACHED || state === QUARANTINED;
    if (this.mode === "state") return state;
    if (this.mode === "age") return this.blocks.ageStep(block);
    if (this.mode === "kind") return this.blocks.kinds[block] + (unreferenced ? KIND_COLOURS.length : 0);
    return (this.blocks.owners[block] % TENANT_COLOURS) + (unreferenced ? TENANT_COLOURS : 0);
  }

  all() {
    this.ids = null;
    this.due();
  }

  later(ids) {
    if (this.ids === undefined) this.ids = [];
    if (this.ids !== null && this.ids.push(ids) > LATER_MAX) this.ids = null; // a hidden page draws nothing
    this.due();
  }

  due() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = 0;
      const began = performance.now();
      this.draw();
      this.drawMs.push(performance.now() - began);
      if (this.drawMs.length > 120) this.drawMs.shift();
      const root = document.documentElement.dataset;
      root.blocks = this.blocks.count;
      root.drawMs = (this.drawMs.reduce((sum, each) => sum + each, 0) / this.drawMs.length).toFixed(2);
      root.drawMsMax = Math.max(...this.drawMs).toFixed(2);
    });
  }

  draw() {
    const ids = this.ids;
    this.ids = undefined;
    if (ids === null) this.legend();
    const painter = {
      palette: this.palette(),
      free: pixel("free"),
      kind: (block) => this.kind(block),
      isFree: (block) => this.blocks.state(block) === FREE,
    };
    const height = this.maps.size > 2 ? HEIGHT / 2 : HEIGHT;
    for (const map of this.maps.values()) {
      if (ids === null) map.lay(height);
      for (const some of ids === null ? [null] : ids) map.paint(some, painter);
      map.show();
    }
  }
}

class PoolMap {
  constructor(pools, pool) {
    this.pools = pools;
    this.base = pool.base;
    this.count = pool.blocks;
    this.small = document.createElement("canvas"); // one pixel a block
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "map of blocks" });
    this.readout = el("output", { class: "readout", "aria-live": "polite" });
    this.at = null;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && this.leave());
    this.canvas.addEventListener("blur", () => this.leave());
    this.canvas.addEventListener(
      "focus",
      () => this.at === null && this.canvas.matches(":focus-visible") && this.go(0),
    );
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  label(pool) {
    const counts = ["held", "cached", "quarantined", "free"].map((name) => `${pool[name === "held" ? "referenced" : name]} ${name}`);
    const said = `Blocks of ${pool.worker}: ${counts.join(", ")}. Use the arrow keys to move between blocks.`;
    if (this.canvas.getAttribute("aria-label") !== said) this.canvas.setAttribute("aria-label", said);
  }

  // Choose the largest cells that fit.
  lay(height) {
    const width = Math.max(60, this.canvas.parentElement?.clientWidth ?? 0);
    const cell = Math.min(CELL_MAX, Math.max(1, Math.floor(Math.sqrt((width * height) / this.count))));
    const columns = Math.min(this.count, Math.floor(width / cell));
    const rows = Math.ceil(this.count / columns);
    const ratio = window.devicePixelRatio || 1;
    Object.assign(this, { cell, columns, rows, ratio });
    this.small.width = columns;
    this.small.height = rows;
    this.image = new ImageData(columns, rows);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.canvas.width = Math.round(columns * cell * ratio);
    this.canvas.height = Math.round(rows * cell * ratio);
    this.canvas.style.width = `${columns * cell}px`;
    this.canvas.style.height = `${rows * cell}px`;
  }

  paint(ids, painter) {
    if (!this.pixels) return;
    const end = Math.min(this.base + this.count, this.pools.blocks.count);
    const one = (block) => {
      this.pixels[block - this.base] = painter.isFree(block) ? painter.free : painter.palette[painter.kind(block)];
    };
    if (ids === null) for (let block = this.base; block < end; block += 1) one(block);
    else for (const block of ids) if (block >= this.base && block < end) one(block);
  }

  show() {
    if (!this.pixels) return;
    const context = this.canvas.getContext("2d");
    const { width, height } = this.canvas;
    this.small.getContext("2d").putImageData(this.image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.clearRect(0, 0, width, height);
    context.drawImage(this.small, 0, 0, width, height);
    const step = this.cell * this.ratio;
    if (this.cell >= GAP_FROM) {
      const line = Math.max(1, Math.round(this.ratio * (this.cell >= 8 ? 1.5 : 1)));
      for (let x = 1; x <= this.columns; x += 1) context.clearRect(Math.round(x * step) - line, 0, line, height);
      for (let y = 1; y <= this.rows; y += 1) context.clearRect(0, Math.round(y * step) - line, width, line);
    }
    if (this.at !== null) {
      const around = Math.max(2, this.ratio * 2);
      const x = (this.at % this.columns) * step;
      const y = Math.floor(this.at / this.columns) * step;
      context.lineWidth = around;
      context.strokeStyle = colour("ink");
      context.strokeRect(x - around / 2, y - around / 2, step + around / 2, step + around / 2);
    }
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.cell);
    const at = Math.floor((event.clientY - box.top) / this.cell) * this.columns + column;
    if (column >= 0 && column < this.columns && at >= 0 && at < this.count) this.go(at);
  }

  key(event) {
    const step = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: this.columns,
      ArrowUp: -this.columns,
      Home: -this.count,
      End: this.count,
    }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.go(Math.max(0, Math.min(this.count - 1, (this.at ?? 0) + step)));
  }

  leave() {
    clearTimeout(this.dwelling);
    this.at = null;
    this.readout.replaceChildren();
    this.show();
  }

  go(at) {
    if (at === this.at) return;
    this.at = at;
    this.show();
    const { blocks, tenants } = this.pools;
    const block = this.base + at;
    const state = blocks.state(block);
    const first = el("b", {}, `Block ${block}`);
    const holders = blocks.holders[block];
    const held = state < HELD ? STATES[state] : `held by ${holders === 255 ? "255 or more" : holders}`;
    const facts = [held];
    if (state !== FREE && blocks.kinds[block]) facts.push(KINDS[blocks.kinds[block]]);
    if (state !== FREE)
      facts.push(`tenant ${tenants.name(blocks.owners[block])}`, `for ${duration(blocks.ageS(block))}`);
    this.readout.replaceChildren(first, ` ${facts.join(" · ")}`);
    clearTimeout(this.dwelling);
    if (state !== FREE) this.dwelling = setTimeout(() => this.ask(block, at), DWELL_MS);
  }

  async ask(block, at) {
    try {
      const told = await this.pools.server.ask(`/page/explain?block=${block}`);
      if (this.at === at)
        this.readout.replaceChildren(
          el("b", {}, `Block ${block}`),
          ` ${told.sentences.map((one) => one.replace(`block ${block} `, "")).join("; ")}`,
        );
    } catch (error) {
      if (this.at === at) this.readout.append(el("span", { class: "soft" }, ` (${error.message})`));
    }
  }
}
