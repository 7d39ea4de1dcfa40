"""Recording what decides a scheduler's steps, repeating it exactly, and looking at it."""
