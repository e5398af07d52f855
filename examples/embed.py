"""Embed a corpus of texts, several batches at a time.

    python examples/embed.py --replicas 2 --texts 1500

Texts of like length are batched together, so batches differ in cost; whichever replica is free
takes the next one. The model is a Transformer encoder with random weights: what is shown is how it
runs, not what it knows. The same batches go through the plain module too, and the embeddings must
be equal to the last bit.
"""

import argparse
import random
import time

import torch
from torch import nn

from samestep import DataParallel, map_batches

BATCH = 32  # texts at a time
WIDTH = 128  # numbers that stand for a text
LONGEST = 96  # characters
WORDS = ["the", "a", "bird", "river", "stone", "night", "green", "small", "old", "sings", "falls"]
DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"


class Encoder(nn.Module):
    """Characters (B, T) to embeddings (B, WIDTH) of length 1; 0 is padding."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH, padding_idx=0)
        self.place = nn.Embedding(LONGEST, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def forward(self, characters):
        padding = characters == 0
        places = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.layers(
            self.embed(characters) + self.place(places), src_key_padding_mask=padding
        )
        kept = ~padding.unsqueeze(-1)
        mean = (hidden * kept).sum(1) / kept.sum(1)
        return nn.functional.normalize(mean, dim=1)


def make_texts(count):
    """Sentences of two to twenty words."""
    source = random.Random(0)
    return [
        " ".join(source.choices(WORDS, k=source.randint(2, 20)))[:LONGEST] for _ in range(count)
    ]


def load(texts):
    """Batches of encoded texts, padded to the longest in each."""
    for start in range(0, len(texts), BATCH):
        rows = [torch.tensor(list(text.encode())) for text in texts[start : start + BATCH]]
        yield nn.utils.rnn.pad_sequence(rows, batch_first=True)


@torch.inference_mode()
def embed_plainly(model, texts):
    return torch.cat([model(batch.to(DEVICE)).cpu() for batch in load(texts)])


def main():
    parser = argparse.ArgumentParser(description="embed a corpus of texts")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--texts", type=int, default=1500, help="how many texts to embed")
    parser.add_argument("--replicas", type=int, default=2, help="replicas that share the batches")
    parser.add_argument("--progress", action="store_true", help="show how far it is")
    args = parser.parse_args()
    if min(args.texts, args.replicas) < 1:
        parser.error("--texts and --replicas must be at least 1")

    torch.manual_seed(0)
    torch.set_num_threads(1)  # as many as each replica has: the same bits, and a fair comparison
    model = Encoder().eval().to(DEVICE)
    texts = sorted(make_texts(args.texts), key=len)

    start = time.perf_counter()
    plain = embed_plainly(model, texts)
    plain_s = time.perf_counter() - start

    model = DataParallel(model, replicas=args.replicas)  # <- the one line
    start = time.perf_counter()
    embeddings = torch.cat(list(map_batches(model, load(texts), progress=args.progress)))
    seconds = time.perf_counter() - start

    print(f"replicas: {model.num_replicas}")
    print(f"texts: {len(texts)}, embeddings: {list(embeddings.shape)}")
    print(f"the plain module on one thread: {len(texts) / plain_s:.0f} texts/s")
    print(f"map_batches: {len(texts) / seconds:.0f} texts/s, {plain_s / seconds:.2f} times as fast")
    nearest = (embeddings @ embeddings[-1]).topk(2).indices[-1]
    print(f"nearest to {texts[-1]!r}:\n           {texts[nearest]!r}")
    deviation = (embeddings - plain).abs().max().item()
    print(f"largest deviation from the plain module: {deviation:.1e} (tolerance 0e+00)")


if __name__ == "__main__":
    main()
