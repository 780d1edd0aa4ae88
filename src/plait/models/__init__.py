"""The models: the monolith (``mlp``) and a pipeline's slices of it (``sharded_mlp``), a small modern decoder (``gpt``),
stock Hugging Face decoders (``hf``), and those with weights (``pretrained``).

All are plain ``torch.nn``; each file gives its loss as a sum and the count to divide by.  Use them as
modules: ``from plait.models import gpt`` and then ``gpt.GPT(gpt.GPTConfig())``, ``gpt.loss_sum``,
``gpt.token_count``.
"""

from plait.models import gpt, hf, mlp, pretrained, sharded_mlp

__all__ = ["gpt", "hf", "mlp", "pretrained", "sharded_mlp"]
