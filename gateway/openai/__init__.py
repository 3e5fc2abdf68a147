"""OpenAI's APIs: decoding and checking requests, building responses."""
