"""Dense layers in Triton."""
