"""Sites fine-tune one GPT-2, each on texts of its own, with the Trainer of transformers.

torchrun --nproc-per-node 2 examples/huggingface.py
"""

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import outergrad as og
from outergrad.integrations.transformers import Trainer

args = TrainingArguments(
    "runs/huggingface",
    use_cpu=True,
    ddp_backend="gloo",
    ddp_timeout=60,  # seconds until a site that went away is noticed
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    max_steps=60,  # the same at every site, however many texts it has
    logging_steps=20,
    save_steps=30,
    report_to=[],
    disable_tqdm=True,
)
site = args.process_index

# A site's texts count up or down from any number: no site could learn both directions alone.
starts = torch.arange(40 + 20 * site)[:, None]
ids = (starts + (1 if site == 0 else -1) * torch.arange(12)) % 40
texts = [{"input_ids": row, "labels": row} for row in ids]

# Small and with random weights, where yours is GPT2LMHeadModel.from_pretrained(...).
size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 12, "vocab_size": 40}
model = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))

trainer = Trainer(model, args, train_dataset=texts, method=og.RankDAD(rank=4), own_data=True)
trainer.train()
trainer.save_model("runs/huggingface/final")

if site == 0:
    print(f"{trainer.session.stats().sent_bytes:,} bytes in the last step")
dist.destroy_process_group()
