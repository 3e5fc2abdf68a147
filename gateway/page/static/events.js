// Parses server-sent events from a response body, however its bytes are split.
// With fetch instead of EventSource, which can neither send a key nor report the reason of a refusal.
const LINE_MAX = 64 << 20;

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let name = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      if (rest.length > LINE_MAX) throw new Error("the server sent an oversized event");
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { name: name || "message", data: data.join("\n") };
          name = "";
          data = [];
        } else if (line[0] !== ":") {
          const colon = line.indexOf(":");
          const field = colon < 0 ? line : line.slice(0, colon);
          const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
          if (field === "data") data.push(value);
          else if (field === "event") name = value;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
