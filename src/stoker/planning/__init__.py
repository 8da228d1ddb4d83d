"""Which settings: legal plans, forecasts on any device, the choice among them and its explanation. No torch."""
