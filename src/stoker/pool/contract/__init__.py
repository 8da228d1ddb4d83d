"""A pool's money in a contract on an Ethereum chain: its source, compiled; its client; keys; and the pool's side."""
