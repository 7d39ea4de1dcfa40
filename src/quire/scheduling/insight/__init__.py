"""What can be seen of a scheduler from outside."""
