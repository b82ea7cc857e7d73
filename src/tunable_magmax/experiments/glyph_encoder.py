"""The encoder of the benchmark `glyphs`: a small ViT, pre-trained on the spot on characters the benchmark lacks.

It learns to give a distorted picture of a character the embedding of the clean one. So it can name characters it has
never seen by their clean pictures, which make the frozen head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunable_magmax.data.arrays import one_thread
from tunable_magmax.errors import required
from tunable_magmax.experiments.glyphs import (
    BASE_STREAM,
    FONTS,
    MILD,
    SIZE,
    Alphabet,
    GlyphDrawing,
    alphabets,
    clean,
    clean_glyphs,
)
from tunable_magmax.files import Progress
from tunable_magmax.models.encoder import Encoder
from tunable_magmax.models.head import Head, mean_head
from tunable_magmax.models.prepared import embed_inputs
from tunable_magmax.models.pretrained import PROCESSOR_FILE, quiet

if TYPE_CHECKING:
    import torch
    from torch import Tensor


EMBEDDING_WIDTH, LAYERS, HEADS, PATCH = 96, 3, 4, 8
MEAN, DEVIATION = 0.7, 0.3  # of pixels, between 0 and 1
PICTURES_EACH = 60  # distorted pictures of each character
STEPS, TRAINING_BATCH, CLEAN = 1000, 96, 12  # the last: clean pictures in a batch
RATE, DECAY, COSINE_SCALE = 4e-3, 0.05, 16.0
HEAD_SCALE = 3.0  # low: cosines must come close to 1 before the loss is content


def glyph_base(path: str | Path, *, seed: int = 0, progress: Progress | None = None) -> Path:
    """Pre-trains the encoder on characters that the benchmark lacks, and saves it in `path`.

    Always on one thread of the CPU, where one seed gives the same bytes again; so small a model gains little from more.
    """
    import torch

    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model()
        _pretrain(model, alphabets()[1], seed, progress or (lambda phase, done, total: None))
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with quiet():
        model.save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": SIZE, "width": SIZE},
        "image_mean": [MEAN] * 3,
        "image_std": [DEVIATION] * 3,
    }
    (folder / PROCESSOR_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return folder


def glyph_head(encoder: Encoder, classes: Sequence[str]) -> Head:
    """Makes the frozen head: for each class the mean embedding of its clean pictures in all fonts."""
    pictures = [picture for fonts in clean_glyphs(classes) for picture in fonts]
    features = embed_inputs(encoder, pictures)
    return mean_head(features, np.repeat(np.arange(len(classes)), len(FONTS)), classes, HEAD_SCALE)


def _model() -> Any:
    transformers = required("transformers")
    config = transformers.ViTConfig(
        hidden_size=EMBEDDING_WIDTH,
        intermediate_size=2 * EMBEDDING_WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=SIZE,
        patch_size=PATCH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.08,  # so narrow a model learns slowly from the usual 0.02
    )
    return transformers.ViTModel(config, add_pooling_layer=False)


def _pretrain(model: Any, alphabet: Alphabet, seed: int, progress: Progress) -> None:
    """Trains the model to map all pictures of a character to one vector, which is learnt too and thrown away."""
    import torch

    count = len(alphabet.characters)
    pictures = _pictures(alphabet, seed, progress)
    plain = torch.from_numpy(
        np.stack([np.asarray(clean(alphabet, k, font))[:, :, 0] for k in range(count) for font in range(len(FONTS))])
    )
    vectors = torch.nn.Parameter(torch.randn(count, EMBEDDING_WIDTH))
    trained = [*model.parameters(), vectors]
    optimiser = torch.optim.AdamW(trained, lr=RATE, weight_decay=DECAY, betas=(0.9, 0.98))
    model.train()
    for step in range(STEPS):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / (0.1 * STEPS)) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        noisy = torch.randint(len(pictures), (TRAINING_BATCH - CLEAN,))
        named = torch.randint(len(plain), (CLEAN,))
        labels = torch.cat([noisy // PICTURES_EACH, named // len(FONTS)])
        states = model(pixel_values=_pixels(torch.cat([pictures[noisy], plain[named]]))).last_hidden_state[:, 0]
        cosines = torch.nn.functional.normalize(states, dim=1) @ torch.nn.functional.normalize(vectors, dim=1).T
        loss = torch.nn.functional.cross_entropy(COSINE_SCALE * cosines, labels)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        progress("pre-training", step + 1, STEPS)
    model.eval()


def _pictures(alphabet: Alphabet, seed: int, progress: Progress) -> Tensor:
    """Draws distorted pictures [characters * PICTURES_EACH, SIZE, SIZE], by character."""
    import torch

    count = len(alphabet.characters)
    drawing = GlyphDrawing(alphabet, seed, BASE_STREAM, MILD)
    rows = np.empty((count * PICTURES_EACH, SIZE, SIZE), dtype=np.uint8)
    for k in range(count):
        for position in range(k * PICTURES_EACH, (k + 1) * PICTURES_EACH):
            rows[position] = drawing(k, position)
        progress("drawing", k + 1, count)
    return torch.from_numpy(rows)


def _pixels(grey: torch.Tensor) -> torch.Tensor:
    """Returns what the image processor makes of grey pictures: [n, 3, SIZE, SIZE]."""
    return ((grey.float() / 255 - MEAN) / DEVIATION).unsqueeze(1).expand(-1, 3, -1, -1)
