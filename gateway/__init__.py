"""HTTP for every client that exists: OpenAI's and Anthropic's APIs, metrics, and a live page.

Law: a gateway holds nothing that its death could lose. It has no queue of its own (admission is the coordinator's), no
conversation and no table: a request that it carries is the coordinator's, under a key. It knows kvforge as any client
does.

Rooms, each importing from those below it alone: `serve` (processes on one port, the command), `app` (which path leads
where), `openai` and `anthropic` (the two APIs), `metrics`, `page` (the live page), `generate` (one answer as it comes),
`replicas` (several coordinators), `chat` (conversations to token ids), `parse` (text to content, reasoning and tool
calls), `http` (bodies, streams, errors), `access` (keys, rights, rates), `config`.
"""
