"""Tenants: their keys, their limits, and what they used.

A request's tenant comes from its API key: `Tenants` (`server/tenancy/tenants.py`) has them by the digests of
keys, reads the key file again when it changes, and a `Tenant` decides what is its own: cache salt, ids and
share (docs/tenants.md). `TenantUsage` holds requests to its limits after they have been tokenized
(`before_submit`).
"""
