"""HTTP front end: OpenAI's and Anthropic's APIs, Prometheus metrics and a live status page.

Admission queues and request tables live in the coordinator, and stored objects in a database: a crashed gateway loses
nothing. It talks to kvforge through the public client library.

Packages, each importing only from those below it:

- `serve`: the command, and the processes that share one port
- `app`: routing
- `openai`, `anthropic`: the two APIs
- `metrics`, `page`: Prometheus metrics and the live page
- `generate`: one answer, from submission to its end
- `replicas`: several coordinators behind one gateway
- `storage`: what must be found again after any death
- `chat`: conversations to token ids
- `parse`: text to content, reasoning and tool calls
- `http`: bodies, event streams, errors
- `access`: API keys, rights and rate limits
- `config`: settings
"""
