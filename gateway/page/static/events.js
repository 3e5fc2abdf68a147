// Server-sent events out of a response's body, however its bytes are split.
// By fetch, not EventSource: that one cannot send a key, and says nothing of why it was refused.
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
      if (rest.length > LINE_MAX) throw new Error("an event without an end");
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
