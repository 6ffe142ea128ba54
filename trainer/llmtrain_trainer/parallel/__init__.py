"""How ranks share the model: the one device mesh, and what is applied to the model along its axes."""
