"""What the prefix indexes hold, told to routers in the words of vLLM's event stream: docs/kv-events.md."""
