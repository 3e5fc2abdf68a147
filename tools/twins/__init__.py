"""The blocking client, generated from the asynchronous one."""
