"""What runs beside the model: the step loop, its process, and the memory plan."""
