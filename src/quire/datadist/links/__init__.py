"""Links between two sides: making them, serving them, pulls and pushes."""
