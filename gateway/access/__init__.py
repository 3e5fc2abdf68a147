"""Who may ask for what: API keys (kept as hashes) with a tenant, rights and rates each."""
