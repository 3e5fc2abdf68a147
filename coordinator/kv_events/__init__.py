"""KV events: changes of the prefix indexes for routers, in the format of vLLM's event stream (docs/kv-events.md)."""
