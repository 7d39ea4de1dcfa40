"""Health, metrics, the monitoring port, and statistics for the page."""
