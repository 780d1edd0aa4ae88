"""Models on disk: Hugging Face folders, read and written piece by piece (``huggingface``)."""
