// The connection to the gateway: a reconnecting event stream, queries, and actions.
import { events } from "./events.js";

const AGAIN_MS = [300, 700, 1500, 3000, 5000];
const SILENT_MS = 6000;
const HIDDEN_MS = 30000;
const KEY = "kvforge-key";

export class Refused extends Error {
  constructor(status, message, retryMs) {
    super(message);
    this.status = status;
    this.retryMs = retryMs;
  }
}

export class Server {
  // onEvent(name, document) is awaited; onLink("live" | "lost" | "refused", message): lost with the message of an error
  // if the gateway answered.
  constructor(onEvent, onLink) {
    this.onEvent = onEvent;
    this.onLink = onLink;
    this.bytes = 0;
    this.live = false;
    this.wake = () => {};
    document.addEventListener("visibilitychange", () => this.seen());
  }

  get headers() {
    const key = sessionStorage.getItem(KEY);
    return key ? { Authorization: `Bearer ${key}` } : {};
  }

  useKey(key) {
    sessionStorage.setItem(KEY, key);
    this.wake();
  }

  async ask(path) {
    return (await this.fetched(path, {})).json();
  }

  async act(path, document) {
    const headers = { "Content-Type": "application/json", "X-Kvforge-Page": "1" };
    await this.fetched(path, { method: "POST", headers, body: JSON.stringify(document) });
  }

  async fetched(path, options) {
    const headers = { ...options.headers, ...this.headers };
    const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    if (response.ok) return response;
    const said = await response.json().catch(() => ({}));
    const message = said.error?.message ?? `the server answered ${response.status}`;
    throw new Refused(response.status, message, Number(response.headers.get("retry-after-ms")) || 0);
  }

  // A hidden tab closes its stream, so that it causes no work on the server.
  seen() {
    clearTimeout(this.hiding);
    if (document.hidden) this.hiding = setTimeout(() => this.abort?.abort(), HIDDEN_MS);
    else this.wake();
  }

  async run() {
    for (let failures = 0; ; failures += 1) {
      let retryMs = 0;
      this.abort = new AbortController();
      try {
        const response = await this.fetched("/page/events", { signal: this.abort.signal });
        await this.read(response, () => (failures = 0));
        this.onLink("lost", "");
      } catch (error) {
        const refused = error instanceof Refused;
        const wantsKey = refused && (error.status === 401 || error.status === 403);
        this.onLink(wantsKey ? "refused" : "lost", refused ? error.message : "");
        if (wantsKey) {
          await new Promise((wake) => (this.wake = wake));
          continue;
        }
        if (refused) retryMs = error.retryMs;
      }
      const againMs = Math.max(retryMs, AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]);
      const pause = document.hidden ? 1 << 30 : againMs;
      await new Promise((wake) => {
        this.wake = wake;
        setTimeout(wake, pause);
      });
    }
  }

  async read(response, came) {
    let watchdog;
    const heard = () => {
      clearTimeout(watchdog);
      watchdog = setTimeout(() => this.abort.abort(), SILENT_MS);
    };
    heard();
    try {
      for await (const { name, data } of events(response.body)) {
        heard();
        this.bytes += data.length + name.length + 15;
        await this.onEvent(name, JSON.parse(data));
        if (name === "hello") {
          came();
          this.live = true;
          this.onLink("live", "");
        }
      }
    } finally {
      this.live = false;
      clearTimeout(watchdog);
    }
  }
}
