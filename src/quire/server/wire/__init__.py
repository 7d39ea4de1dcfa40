"""Bodies in and answers out: reading, validation, errors, streams, and the OpenAPI document."""
