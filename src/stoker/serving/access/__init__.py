"""Who may ask: API keys and TLS."""
