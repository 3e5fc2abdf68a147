"""From conversations to the token ids of a prompt: chat templates, tools, and prompt hygiene for the prefix cache."""
