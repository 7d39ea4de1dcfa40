"""What runs beside the model: the step loop, the engine process, the memory plan and KV events."""
