// Unpacks the server's frames: zlib in base64, as columns of numbers.

export async function inflated(base64) {
  const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A frame's columns, see gateway/page/blocks.py. ids: null if the frame has all blocks.
export async function columns(frame) {
  const bytes = await inflated(frame.data);
  const n = frame.n;
  const whole = frame.base === 0;
  let at = 0;
  const take = (size) => bytes.slice(at, (at += n * size)).buffer; // copied for alignment
  const ids = whole ? null : new Uint32Array(take(4));
  const holders = new Uint8Array(take(1));
  const owners = new Uint16Array(take(2));
  const ages = new Uint8Array(take(1));
  const kinds = new Uint8Array(take(1));
  const states = new Uint8Array(take(1));
  return { ids, holders, owners, ages, kinds, states };
}
