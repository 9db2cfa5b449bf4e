"""What looks at a run while it trains: guards, health of the attention, and a watchdog."""
