"""HTTP front end: OpenAI's and Anthropic's APIs, Prometheus metrics and a live status page.

A gateway is stateless: admission queues, conversations and request tables live in the coordinator, so a crashed gateway
loses nothing. It talks to kvforge through the public client library.

Packages, each importing only from those below it:

- `serve`: the command, and the processes that share one port
- `app`: routing
- `openai`, `anthropic`: the two APIs
- `metrics`, `page`: Prometheus metrics and the live page
- `generate`: one answer, from submission to its end
- `replicas`: several coordinators behind one gateway
- `chat`: conversations to token ids
- `parse`: text to content, reasoning and tool calls
- `http`: bodies, event streams, errors
- `access`: API keys, rights and rate limits
- `config`: settings
"""
