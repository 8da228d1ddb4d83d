"""A GAN on the handwritten digits inside the package: two modules, two optimisers, a step of the job's own."""

import torch
import torch.nn.functional as F
from torch import nn

import stoker

NOISE = 32


def networks() -> nn.ModuleDict:
    """A generator from noise [B, 32] to images [B, 64], and a discriminator from images to one logit [B, 1]."""
    generator = nn.Sequential(
        nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64)
    )
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def optimizers(model: nn.ModuleDict) -> dict[str, torch.optim.Optimizer]:
    """One for each network."""
    return {name: torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999)) for name, part in model.items()}


def step(
    model: nn.ModuleDict, optimizers: dict[str, torch.optim.Optimizer], batch: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """One update: the discriminator on real and made images, then the generator against it."""
    generator, discriminator = model["generator"], model["discriminator"]
    real = batch[0].flatten(1)
    made = generator(torch.randn(len(real), NOISE, device=real.device, dtype=real.dtype))

    of_real, of_made = discriminator(real), discriminator(made.detach())
    discriminator_loss = F.softplus(-of_real).mean() + F.softplus(of_made).mean()
    discriminator_loss.backward()
    optimizers["discriminator"].step()

    fooled = F.softplus(-discriminator(made)).mean()
    fooled.backward()
    optimizers["generator"].step()
    return {"loss": fooled, "discriminator": discriminator_loss}


def job(epochs: float = 200, batch: int = 64) -> stoker.Job:
    """What is learned: to draw digits."""
    train, _ = stoker.data.digits()
    return stoker.Job(
        model=networks,
        data=train,
        step=step,
        optimizer=optimizers,
        batch=batch,
        until=stoker.epochs(epochs),
        average=0.99,
    )
