"""Code that is not the scheduler's own, behind calls that always answer."""
