"""OpenAI's API: what is asked, checked by name, and what is answered."""
