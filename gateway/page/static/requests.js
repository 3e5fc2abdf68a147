// Waiting, running and ended requests, with an explanation of each on demand.
import { tenantShade } from "./colours.js";
import { byId, el, keyed, swatch, text } from "./elements.js";
import { Explainer } from "./explainer.js";
import { count, duration, milliseconds } from "./words.js";

// Columns of a row, see gateway/page/documents.py.
const ID = 0,
  STATE = 1,
  REASON = 2,
  TENANT = 3,
  WORKER = 4,
  PROMPT = 5,
  GENERATED = 6,
  MAX = 7,
  CAME = 8,
  FIRST = 9,
  ENDED = 10;
const HEAD = [
  ["id", ""],
  ["state", ""],
  ["tenant", ""],
  ["worker", "roomy"],
  ["prompt", "roomy number"],
  ["generated", ""],
  ["first token", "roomy number"],
  ["age", "roomy number"],
  ["", ""],
];
const ID_SHOWN = 6; // trailing digits; the detail view shows the full id
const ALIVE = ["pending", "running", "preempted"];
const WORDS = { pending: "waiting" };

const shortId = (id) => (id >= 10 ** (ID_SHOWN + 2) ? `…${String(id).slice(-ID_SHOWN)}` : String(id));

export class Requests {
  constructor(server, tenants) {
    this.server = server;
    this.tenants = tenants;
    this.rows = [];
    this.serverMs = Date.now();
    this.admin = false;
    this.body = el("tbody", {});
    const head = el(
      "tr",
      {},
      ...HEAD.map(([words, kind]) =>
        el("th", { scope: "col", class: kind }, words || el("span", { class: "hidden" }, "why")),
      ),
    );
    this.table = el(
      "div",
      { class: "scroll tall", tabindex: "0", role: "region", "aria-label": "List of requests" },
      el("table", { class: "requests" }, el("thead", {}, head), this.body),
    );
    this.none = el(
      "p",
      { class: "empty" },
      "No requests yet.",
    );
    this.past = el("a", { class: "past", href: "#h-latency" }, "Skip the list of requests");
    byId("requests").append(this.none, this.past, this.table);
    this.table.hidden = this.past.hidden = true;
    this.explainer = new Explainer(
      server,
      (id) => `request=${id}`,
      (id) => this.body.keyed?.get(`why ${id}`)?.querySelector(".why"),
    );
  }

  show({ rows, total }) {
    this.rows = rows;
    this.none.hidden = rows.length > 0;
    this.table.hidden = this.past.hidden = rows.length === 0;
    text(byId("requests-shown"), total > rows.length ? `${rows.length} of ${count(total)}, waiting ones first` : "");
    this.draw();
  }

  tick(serverMs) {
    this.serverMs = serverMs;
    for (const row of this.rows) if (row[ENDED] === null) this.age(this.body.keyed?.get(row[ID]), row);
  }

  draw() {
    const items = this.rows.flatMap((row) => (this.open === row[ID] ? [row, { why: row[ID] }] : [row]));
    keyed(
      this.body,
      items,
      (item) => (item.why === undefined ? item[ID] : `why ${item.why}`),
      (item) => (item.why === undefined ? this.make(item) : this.detail(item.why)),
      (node, item) => item.why === undefined && this.update(node, item),
    );
  }

  make(row) {
    const why = el(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-expanded": "false",
        "aria-label": `explain the state of request ${row[ID]}`,
        onclick: () => this.toggle(row[ID]),
      },
      "why?",
    );
    const progress = el(
      "div",
      { class: "progress" },
      el("div", { class: "track" }, el("span", { class: "used" })),
      el("span", { class: "number" }),
    );
    const cells = [
      el("span", { title: row[ID] }, shortId(row[ID])),
      el("span", { class: "state" }),
      el("span", { class: "name" }, swatch("transparent"), el("span", {})),
      "",
      "",
      progress,
      "",
      "",
      why,
    ];
    return el("tr", {}, ...cells.map((cell, at) => el("td", { class: HEAD[at][1] }, cell)));
  }

  update(node, row) {
    const cells = node.children;
    const state = cells[1].firstElementChild;
    text(state, WORDS[row[STATE]] ?? row[STATE]);
    state.title = row[REASON];
    state.dataset.state = row[STATE];
    node.classList.toggle("over", !ALIVE.includes(row[STATE]));
    const [shade, name] = cells[2].firstElementChild.children;
    const number = this.tenants.rows.find((tenant) => tenant.tenant === row[TENANT])?.number;
    shade.style.background = number ? tenantShade(number) : "transparent";
    text(name, row[TENANT]);
    cells[2].firstElementChild.title = row[TENANT];
    text(cells[3], row[WORKER]);
    text(cells[4], count(row[PROMPT]));
    cells[5].querySelector(".used").style.width = `${(100 * row[GENERATED]) / Math.max(1, row[MAX])}%`;
    text(cells[5].querySelector(".number"), `${count(row[GENERATED])} / ${count(row[MAX])}`);
    text(cells[6], row[FIRST] === null ? "–" : milliseconds(row[FIRST]));
    node.querySelector("button").setAttribute("aria-expanded", String(this.open === row[ID]));
    this.age(node, row);
  }

  age(node, row) {
    if (node) text(node.children[7], duration(((row[ENDED] ?? this.serverMs) - row[CAME]) / 1000));
  }

  toggle(id) {
    this.open = this.open === id ? undefined : id;
    this.draw();
    this.explainer.open(this.open);
  }

  detail(id) {
    const said = el("div", { class: "why", role: "status" }, el("p", { class: "soft" }, "loading …"));
    const cancel = el("span", { class: "row" });
    const head = el("div", { class: "head" }, el("b", {}, `Request ${id}`), cancel);
    const row = this.rows.find((each) => each[ID] === id);
    if (this.admin && ALIVE.includes(row?.[STATE])) this.offer(cancel, id);
    return el("tr", { class: "detail" }, el("td", { colspan: String(HEAD.length) }, head, said));
  }

  offer(place, id) {
    const first = el("button", { type: "button" }, "Cancel this request");
    first.addEventListener("click", () => {
      const yes = el("button", { type: "button", class: "danger" }, "Yes, cancel it");
      const no = el("button", { type: "button" }, "Keep it running");
      yes.addEventListener("click", () => this.cancel(place, id));
      no.addEventListener("click", () => this.offer(place, id));
      place.replaceChildren(yes, no);
      no.focus();
    });
    place.replaceChildren(first);
  }

  async cancel(place, id) {
    try {
      await this.server.act("/page/cancel", { request: id });
      place.replaceChildren(el("span", { class: "soft" }, "cancelled"));
    } catch (error) {
      place.replaceChildren(el("span", { class: "bad", role: "alert" }, error.message));
    }
  }
}
