"""Tensors cut over named axes, and tensor parallelism."""
