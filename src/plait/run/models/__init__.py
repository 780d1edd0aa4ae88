"""The models that the command line trains: plain ``torch.nn``, each with its loss as a sum and the count to divide by.

mlp.py           linear layers in one ``nn.Sequential``
gpt.py           a small modern decoder
moe.py           the same with mixtures of experts
hf.py            stock Hugging Face decoders with random weights
pretrained.py    makes a model from a Hugging Face folder
documents.py     attention masks and positions for rows that hold several documents

Use them as modules: ``from plait.run.models import gpt`` and then ``gpt.GPT(gpt.GPTConfig())``, ``gpt.loss_sum``,
``gpt.token_count``.
"""
