"""The Hugging Face room: loss, data, loading."""
