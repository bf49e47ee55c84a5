"""What a model's layers keep between steps."""
