"""Models on disk.

huggingface.py   Hugging Face folders: each rank reads only the rows that it keeps; rank 0 writes, tensor by tensor
"""
