"""A GAN whose critic is kept smooth by a gradient penalty: derivatives of derivatives.

    python examples/gan_penalty.py --replicas 2 --steps 30

The penalty differentiates the critic's output by its input with `create_graph=True`, and the loss
is then differentiated by the parameters; both derivatives pass through the wrapper. The data are
points on a circle. The same training runs on the plain critic and on the wrapped one.
"""

import argparse

import torch
from torch import nn

from samestep import DataParallel

BATCH = 64  # points per step
NOISE = 4  # features of the generator's input
CRITIC_STEPS = 5  # steps of the critic for one of the generator
PENALTY = 1.0  # weight of the gradient penalty
# float64: the two runs differ in the order of additions only. But a GAN is a chaotic system: what
# begins at 1e-16 grows tenfold every few steps, so only runs as short as this one can be compared.
TOLERANCE = 1e-9
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


def make_models():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.Tanh(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.Softplus(), nn.Linear(64, 64), nn.Tanh())
    critic.append(nn.Linear(64, 1, bias=False))  # a bias would cancel in the loss
    return generator.double().to(DEVICE), critic.double().to(DEVICE)


def points_on_circle(source):
    """Real data (BATCH, 2)."""
    angle = 2 * torch.pi * torch.rand(BATCH, generator=source, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], dim=1).to(DEVICE)


def make_noise(source):
    """Input of the generator (BATCH, NOISE)."""
    return torch.randn(BATCH, NOISE, generator=source, dtype=torch.float64).to(DEVICE)


def gradient_penalty(critic, real, fake, source):
    """How far the critic's slope is from one, at points between real and fake ones."""
    share = torch.rand(BATCH, 1, generator=source, dtype=torch.float64).to(DEVICE)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def train(generator, critic, steps):
    """The ordinary loop; returns the critic's loss and the generator's error for each step."""
    source = torch.Generator().manual_seed(1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.005, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    history = []
    for _ in range(steps):
        for _ in range(CRITIC_STEPS):
            real = points_on_circle(source)
            fake = generator(make_noise(source)).detach()
            distance = critic(real).mean() - critic(fake).mean()
            penalty = gradient_penalty(critic, real, fake, source)
            critic_optimizer.zero_grad()
            loss = PENALTY * penalty - distance
            loss.backward()
            critic_optimizer.step()
        generator_optimizer.zero_grad()
        fake = generator(make_noise(source))
        (-critic(fake).mean()).backward()
        generator_optimizer.step()
        error = (fake.norm(dim=1) - 1).abs().mean()  # how far from the circle its points are
        history.append((loss.item(), error.item()))
    return history


def main():
    parser = argparse.ArgumentParser(description="a GAN with a gradient penalty")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument(
        "--steps",
        type=int,
        default=30,
        help="steps of the generator; the critic takes several in each",
    )
    parser.add_argument("--replicas", type=int, default=2, help="replicas that share each batch")
    args = parser.parse_args()
    if min(args.steps, args.replicas) < 1:
        parser.error("--steps and --replicas must be at least 1")

    plain = train(*make_models(), args.steps)

    generator, critic = make_models()
    critic = DataParallel(critic, replicas=args.replicas)  # <- the one line
    parallel = train(generator, critic, args.steps)

    print(f"replicas: {critic.num_replicas}")
    print("step   critic's loss, plain   parallel   points off the circle by, plain   parallel")
    for step in range(0, args.steps, max(1, args.steps // 8)):
        (loss, error), (loss_k, error_k) = plain[step], parallel[step]
        print(f"{step:4d}   {loss:20.6f}   {loss_k:8.6f}   {error:31.6f}   {error_k:8.6f}")
    print(f"points off the circle by: {parallel[0][1]:.6f} -> {parallel[-1][1]:.6f}")
    pairs = zip(sum(plain, ()), sum(parallel, ()), strict=True)
    deviation = max(abs(a - b) for a, b in pairs)
    print(f"largest deviation from the plain module: {deviation:.1e} (tolerance {TOLERANCE:.0e})")


if __name__ == "__main__":
    main()
