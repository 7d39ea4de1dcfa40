"""Tenants: their keys, limits and usage.

A request's tenant follows from its API key: `Tenants` (`server/tenancy/tenants.py`) finds tenants by the
digests of keys, and reloads the key file when it changes. A `Tenant` separates cache salts, ids and shares
(docs/tenants.md). `TenantUsage` applies its limits after tokenization (`before_submit`).
"""
