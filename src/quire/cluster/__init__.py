"""Several engines as one server: which engine gets a request, and what happens when one fails."""
