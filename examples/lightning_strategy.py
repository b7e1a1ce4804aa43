"""Sites learn ten digits together with Lightning: the strategy is all that is new.

python examples/lightning_strategy.py        (Lightning starts the processes)
"""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import outergrad as og
from outergrad.integrations.lightning import OutergradStrategy


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        hidden = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(512, 10))

    def training_step(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


images, labels = map(torch.tensor, load_digits(return_X_y=True))
data = TensorDataset(images.float() / 16, labels)
train, test = random_split(data, [1440, 357], torch.Generator().manual_seed(0))

strategy = OutergradStrategy(og.DAD())
trainer = pl.Trainer(accelerator="cpu", devices=2, max_epochs=5, strategy=strategy, logger=False)
trainer.fit(Digits(), DataLoader(train, 16, shuffle=True), DataLoader(test, 64))

if trainer.is_global_zero:
    sent = strategy.session.stats().sent_bytes
    accuracy = trainer.callback_metrics["accuracy"]
    print(f"test accuracy {accuracy:.1%}, {sent:,} bytes in the last step")
