// A chat with the model over the public API.
import { byId, el, text } from "./elements.js";
import { events } from "./events.js";
import { milliseconds, short } from "./words.js";

const SHOWN_MAX = 200_000; // characters of an answer

export class Chat {
  constructor(server) {
    this.server = server;
    this.model = "";
    this.messages = [];
    const box = byId("chat-text");
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("chat-stop").addEventListener("click", () => this.abort?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    byId("chat").replaceChildren();
    byId("chat-clear").hidden = true;
    text(byId("chat-told"), "");
  }

  async send() {
    const box = byId("chat-text");
    const said = box.value.trim();
    if (!said || this.abort) return;
    box.value = "";
    this.messages.push({ role: "user", content: said });
    const thought = el("div", { class: "thought", hidden: true });
    const answer = el("div", { class: "answer" });
    byId("chat").append(el("div", { class: "asked" }, said), thought, answer);
    byId("chat-clear").hidden = false;
    this.busy(true);
    const began = performance.now();
    const got = { content: "", reasoning: "", pieces: 0, firstMs: null, usage: null, reason: "" };
    try {
      await this.stream(got, began, () => {
        text(thought, got.reasoning);
        thought.hidden = !got.reasoning;
        text(answer, got.content);
        this.tell(got, began);
        byId("chat").scrollTop = byId("chat").scrollHeight;
      });
      if (!got.content && !got.reasoning) answer.append(el("span", { class: "soft" }, "(an empty answer)"));
    } catch (error) {
      const stopped = error.name === "AbortError";
      answer.append(
        el(
          "span",
          { class: stopped ? "soft" : "bad" },
          `${got.content ? " " : ""}${stopped ? "(stopped)" : this.problem(error)}`,
        ),
      );
    }
    if (got.content) this.messages.push({ role: "assistant", content: got.content });
    else this.messages.pop();
    this.busy(false);
  }

  problem(error) {
    return error.status === 404 && !/model/i.test(error.message)
      ? "This server has no /v1/chat/completions."
      : error.message;
  }

  async stream(got, began, show) {
    this.abort = new AbortController();
    const body = {
      model: this.model,
      messages: this.messages,
      stream: true,
      max_tokens: Number(byId("chat-tokens").value) || 256,
      stream_options: { include_usage: true },
    };
    const options = {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: this.abort.signal,
    };
    const response = await this.server.fetched("/v1/chat/completions", options);
    for await (const { data } of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      got.usage = chunk.usage ?? got.usage;
      const choice = chunk.choices?.[0];
      const delta = choice?.delta ?? {};
      const reasoning = delta.reasoning_content ?? "";
      if (delta.content || reasoning) {
        got.firstMs ??= performance.now() - began;
        got.pieces += 1;
        if (got.content.length < SHOWN_MAX) got.content += delta.content ?? "";
        if (got.reasoning.length < SHOWN_MAX) got.reasoning += reasoning;
      }
      got.reason = choice?.finish_reason ?? got.reason;
      show();
    }
  }

  tell(got, began) {
    const tokens = got.usage?.completion_tokens ?? got.pieces;
    const seconds = (performance.now() - began - (got.firstMs ?? 0)) / 1000;
    const speed = tokens > 1 && seconds > 0 ? `, ${short((tokens - 1) / seconds)} tokens/s` : "";
    const cached = got.usage?.prompt_tokens_details?.cached_tokens;
    const hits = cached ? `, ${cached} of ${got.usage.prompt_tokens} prompt tokens from cache` : "";
    const cut = got.reason === "length" ? ", cut at the limit" : "";
    text(byId("chat-told"), `${tokens} tokens, the first after ${milliseconds(got.firstMs)}${speed}${hits}${cut}`);
  }

  busy(busy) {
    if (!busy) this.abort = undefined;
    byId("chat-send").hidden = busy;
    byId("chat-stop").hidden = !busy;
    byId("chat").setAttribute("aria-busy", String(busy));
  }
}
