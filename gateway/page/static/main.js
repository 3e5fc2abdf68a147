// The page: dispatches the server's documents to its parts.
import { Announcer } from "./announcer.js";
import { Chat } from "./chat.js";
import { byId, el, keyed, text } from "./elements.js";
import { Lines } from "./latency.js";
import { Pools } from "./pools.js";
import { Requests } from "./requests.js";
import { Server } from "./server.js";
import { Tenants } from "./tenants.js";
import { showWorkers } from "./workers.js";
import { bytes, count, duration, many, time } from "./words.js";

const MARKS = { good: "●", notice: "●", bad: "●" };
const server = new Server(take, link);
const tenants = new Tenants(server);
const pools = new Pools(server, tenants);
const requests = new Requests(server, tenants);
const lines = new Lines();
const chat = new Chat(server);
const announcer = new Announcer(() => text(byId("said"), byId("sentence").textContent));
let startedMs = 0;
let blocks = 0;
let poolCount = 0;

const takers = {
  hello({ admin }) {
    requests.admin = admin;
    byId("drain").hidden = !admin;
    pools.blocks.frame = 0; // the next frame has all blocks
    lines.points = [];
  },
  summary({ level, sentence, notes, stale }) {
    document.body.classList.toggle("stale", stale);
    byId("summary").dataset.level = level;
    text(byId("sentence"), sentence);
    announcer.see(level);
    document.title = `${MARKS[level]} ${sentence} · kvforge`;
    byId("notes").replaceChildren(...notes.filter(Boolean).map((note) => el("p", {}, note)));
  },
  now(now) {
    lines.now(now);
    requests.tick(now.at_ms);
    text(byId("map-problem"), now.map ?? "");
    byId("map-problem").hidden = !now.map;
    about(now.at_ms);
    if (now.lives) text(byId("lives"), lives(now.lives));
  },
  about({ model, started_ms, draining }) {
    startedMs = started_ms;
    byId("all").hidden = false;
    chat.model = model?.name ?? "";
    takers.model = model
      ? [model.name, model.dtype, model.cache && `cache of ${model.cache}`, `${count(model.context)} tokens of context`]
          .filter(Boolean)
          .join(" · ")
      : "";
    byId("drain").disabled = draining;
  },
  pools(rows) {
    blocks = rows.reduce((sum, pool) => sum + pool.blocks, 0);
    pools.show(rows);
    poolCount = rows.length;
    if (takers.tenantRows) tenants.show(takers.tenantRows, blocks, poolCount);
  },
  tenants(document) {
    const before = tenants.rows.map((row) => row.tenant).join("\n");
    takers.tenantRows = document;
    tenants.show(document, blocks, poolCount);
    if (before !== tenants.rows.map((row) => row.tenant).join("\n")) pools.legend();
  },
  workers: showWorkers,
  requests: (document) => requests.show(document),
  latency: (rows) => lines.latency(rows),
  points: (points) => lines.take(points),
  blocks: (frame) => pools.take(frame),
  totals(totals) {
    lines.totals(totals);
    const parts = ["accepted", "finished", "failed", "cancelled", "expired", "refused"].map(
      (name) => `${count(totals[name])} ${name}`,
    );
    const again = totals.recomputed_tokens ? ` · ${count(totals.recomputed_tokens)} tokens recomputed` : "";
    text(
      byId("totals"),
      `Since the start: ${parts.join(", ")} · ${many(totals.preemptions, "preemption")}${again} · ${many(totals.clients, "client")}`,
    );
  },
  happenings(rows) {
    const parent = byId("lately");
    keyed(
      parent,
      rows,
      (row) => `${row.at_ms} ${row.text}`,
      (row) => el("li", { "data-level": row.level }, el("time", {}, time(row.at_ms)), el("span", {}, row.text)),
      () => {},
    );
    if (!rows.length && !parent.querySelector(".empty"))
      parent.append(el("li", { class: "empty" }, "No events yet."));
    else if (rows.length) parent.querySelector(".empty")?.remove();
  },
};

async function take(name, document) {
  await takers[name]?.(document);
  window.document.documentElement.dataset.bytes = String(server.bytes);
}

function lives(told) {
  const journal = told.journal_records_total
    ? `Journal: ${bytes(told.journal_bytes)}, ${many(told.journal_records_total, "record")}.`
    : "Journal disabled.";
  const parts = [];
  if (told.restarts_total)
    parts.push(`coordinator restarted ${many(told.restarts_total, "time")} with its state intact`);
  if (told.workers_lost_total) parts.push(`${many(told.workers_lost_total, "worker")} lost`);
  if (told.workers_returned_total)
    parts.push(`${many(told.workers_returned_total, "worker")} reconnected after a restart`);
  return `${journal} Since the start: ${parts.join("; ") || "no restarts and no losses"}.`;
}

function about(nowMs) {
  const up = startedMs ? `up ${duration(Math.max(0, (nowMs - startedMs) / 1000))}` : "";
  text(byId("about"), [takers.model, up].filter(Boolean).join(" · "));
}

function link(state, message) {
  const shown = byId("link");
  shown.dataset.state = state;
  text(shown, { live: "live", lost: "reconnecting", refused: "no key" }[state]);
  byId("key").hidden = state !== "refused";
  if (state === "refused") byId("all").hidden = true;
  if (state === "live") return;
  if (state === "refused") {
    takers.summary({ level: "notice", sentence: "API key required.", notes: [], stale: false });
    text(byId("key-problem"), sessionStorage.length ? message : "");
    byId("key-value").focus();
  } else {
    takers.summary({
      level: "bad",
      sentence: message ? "The gateway cannot serve this page." : "The gateway does not answer.",
      notes: [message, "This page retries automatically; values shown are out of date."],
      stale: true,
    });
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  server.useKey(byId("key-value").value.trim());
});

byId("drain").addEventListener("click", () => {
  text(byId("drain-problem"), "");
  byId("drain-dialog").showModal();
});

byId("drain-yes").addEventListener("click", async () => {
  const after = Number(byId("drain-after").value);
  try {
    await server.act("/page/drain", { deadline_s: after > 0 ? after : null });
    byId("drain-dialog").close();
  } catch (error) {
    text(byId("drain-problem"), error.message);
  }
});

server.run();
