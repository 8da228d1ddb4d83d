"""Other people's idle devices: offers, leases and money in a signed log; jobs in isolation; checks by replay."""
