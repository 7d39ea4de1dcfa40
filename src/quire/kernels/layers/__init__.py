"""Dense layers and experts, and the weights that they compute with."""
