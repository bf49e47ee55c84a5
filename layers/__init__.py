"""What a model's layers keep between steps, and the masks and biases that they bring to a call."""
