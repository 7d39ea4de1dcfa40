"""The engines behind the router: requests to them, health, metrics, and KV events."""
