"""What every API that generates has in common: from a body to requests, and from outputs to an answer."""
