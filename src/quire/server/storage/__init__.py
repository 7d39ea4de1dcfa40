"""What the server keeps between requests: the database, responses, and their events."""
