// Tenants: the blocks of each, between its floor and ceiling.
import { tenantShade } from "./colours.js";
import { byId, el, keyed, swatch, text } from "./elements.js";
import { Explainer } from "./explainer.js";
import { bytes, count, many, percent, short } from "./words.js";

export class Tenants {
  constructor(server) {
    this.server = server;
    this.rows = [];
    this.explainer = new Explainer(
      server,
      (number) => `tenant=${encodeURIComponent(this.name(number))}`,
      (number) => byId("tenants").keyed?.get(number)?.querySelector(".why"),
    );
  }

  named() {
    return this.rows;
  }

  name(number) {
    return this.rows.find((row) => row.number === number)?.tenant ?? `no. ${number}`;
  }

  // blocks, pools: the totals; floors and ceilings apply to each pool.
  show({ rows, total }, blocks, pools) {
    this.rows = rows;
    this.pools = pools;
    const parent = byId("tenants");
    const hold = rows.some((row) => (row.ceiling > 0 && row.ceiling * pools < blocks) || row.floor > 0);
    text(
      byId("tenants-shown"),
      total > rows.length ? `${rows.length} of ${count(total)}` : hold ? "marks: floor and ceiling" : "",
    );
    if (!rows.length) {
      if (!parent.querySelector(".empty")) parent.append(el("p", { class: "empty" }, "No tenants yet."));
    } else parent.querySelector(".empty")?.remove();
    keyed(
      parent,
      rows,
      (row) => row.number,
      (row) => this.make(row),
      (node, row) => this.update(node, row, blocks),
    );
  }

  make(row) {
    const why = el(
      "button",
      { type: "button", class: "quiet", "aria-expanded": "false", onclick: () => this.toggle(row.number) },
      "details",
    );
    const track = el(
      "div",
      { class: "track" },
      el("span", { class: "used" }),
      el("span", { class: "floor" }),
      el("span", { class: "ceiling" }),
    );
    return el(
      "div",
      { class: "tenant" },
      el(
        "div",
        { class: "head" },
        el("span", { class: "name" }, swatch(tenantShade(row.number)), el("b", {})),
        el("span", { class: "soft" }),
        why,
      ),
      track,
      el("div", { class: "soft told" }),
      el("div", { class: "why", role: "status", hidden: true }),
    );
  }

  update(node, row, blocks) {
    text(node.querySelector("b"), row.tenant);
    node.querySelector(".name").title = row.tenant;
    node.querySelector("button").setAttribute("aria-label", `details of tenant ${row.tenant}`);
    this.unfold(node, row.number);
    const share = blocks ? row.blocks / blocks : 0;
    node.querySelector(".swatch").style.background = tenantShade(row.number);
    const used = node.querySelector(".used");
    used.style.width = `${100 * Math.min(1, share)}%`;
    used.style.background = tenantShade(row.number);
    const place = (mark, value) => {
      const shown = value > 0 && blocks > 0 && value < blocks;
      mark.hidden = !shown;
      if (shown) mark.style.left = `${(100 * value) / blocks}%`;
    };
    place(node.querySelector(".floor"), row.floor * this.pools);
    place(node.querySelector(".ceiling"), row.ceiling * this.pools);
    text(node.querySelector(".head .soft"), row.pending ? `${count(row.pending)} waiting` : "");
    const each = this.pools > 1 ? " per pool" : "";
    const facts = [`${many(row.blocks, "block")} (${percent(share)})`, bytes(row.bytes)];
    if (row.ceiling > 0 && row.ceiling * this.pools < blocks) facts.push(`ceiling ${count(row.ceiling)}${each}`);
    if (row.floor > 0) facts.push(`floor ${count(row.floor)}${each}`);
    for (const [tier, of] of [
      ["host", "in host memory"],
      ["disk", "on disk"],
    ]) {
      const [held, floor, ceiling] = [row[`${tier}_blocks`], row[`${tier}_floor`], row[`${tier}_ceiling`]];
      const bounds = [floor > 0 && `floor ${count(floor)}`, ceiling > 0 && `ceiling ${count(ceiling)}`].filter(Boolean);
      if (held > 0 || bounds.length) facts.push([`${count(held)} ${of}`, ...bounds].join(", "));
    }
    if (row.weight !== 1) facts.push(`weight ${short(row.weight)}`);
    if (row.hits !== null) facts.push(`${percent(row.hits)} prefix hits`);
    text(node.querySelector(".told"), facts.join(" · "));
  }

  // Opens the details of a tenant, and closes those of another.
  toggle(number) {
    this.open = this.open === number ? undefined : number;
    for (const [each, node] of byId("tenants").keyed) this.unfold(node, each);
    this.explainer.open(this.open);
  }

  unfold(node, number) {
    node.querySelector(".why").hidden = number !== this.open;
    node.querySelector("button").setAttribute("aria-expanded", String(number === this.open));
  }
}
