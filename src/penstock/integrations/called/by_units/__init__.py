"""Read single units of weights, or whole weights, when an operator of the model asks for them."""
