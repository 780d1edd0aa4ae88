"""A Llama of transformers, random and tiny: trained, and made to write."""

import sys

import plait
import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
comm = plait.join(device="cpu")
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=3, **sizes)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
engine = plait.Engine(model, comm, strategy=sys.argv[2], optimizer=optimizer)
scheduler = get_cosine_schedule_with_warmup(optimizer, 2, 10)

text = torch.tensor(list(b"to be, or not to be: that is the question. " * 30))
losses = []
for step in range(10):
    windows = text.unfold(0, 16, 5)[6 * step : 6 * step + 6][comm.rank :: comm.world_size]
    loss = model(input_ids=windows, labels=windows).loss
    engine.backward(loss, windows[:, 1:].numel(), reduction="mean")
    engine.reduce(clip=1.0)
    optimizer.step()
    scheduler.step()
    losses.append(engine.last.loss)

model.eval()
how = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
with torch.no_grad():
    tokens = model.generate(text[None, :6], attention_mask=torch.ones(1, 6), **how)
state = engine.full_state_dict()
if comm.rank == 0:
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, writes {bytes(tokens[0].tolist())}")
    torch.save({"losses": losses, "tokens": tokens[0].tolist(), "model": state}, sys.argv[1])
comm.close()
