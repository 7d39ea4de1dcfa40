"""Prometheus metrics and OpenTelemetry traces."""
