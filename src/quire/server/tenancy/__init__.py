"""Tenants: their keys, their limits, and what they used."""
