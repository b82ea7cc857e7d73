"""How fast the training loop is, against a step that does nothing but compute.

    python benchmarks/train.py                    # a random ViT-S/4 on 32 x 32 images, batch 128
    python benchmarks/train.py --size base        # ViT-B/16 on 224 x 224

Printed: images per second of the loop as `tmx train` runs it (rows gathered, augmented and normalised for each step);
of the bare step, which is the same optimisation step on one batch that is ready; the ratio of the two; and, on a GPU,
the share of the speed of large bfloat16 matrix products that the step's own products reach.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from tunable_magmax.data.benchmark import Benchmark, BenchmarkOptions, Task
from tunable_magmax.data.samples import Samples
from tunable_magmax.models.encoder import Encoder, load_encoder
from tunable_magmax.models.head import Head
from tunable_magmax.models.prepared import Prepared, prepare
from tunable_magmax.training.config import Optimisation, TrainConfig
from tunable_magmax.training.step import Step
from tunable_magmax.training.trainer import Trainer

SIZES = {  # image, patch, width, depth, heads
    "small": (32, 4, 384, 12, 6),
    "base": (224, 16, 768, 12, 12),
    "tiny": (32, 8, 64, 2, 2),
}
CLASSES = 5


def make_encoder(size: str, device: str, folder: Path) -> Encoder:
    """Makes a randomly initialised CLIP image tower."""
    import transformers

    side, patch, width, depth, heads = SIZES[size]
    config = transformers.CLIPVisionConfig(
        image_size=side,
        patch_size=patch,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        projection_dim=width,
    )
    transformers.CLIPVisionModelWithProjection(config).save_pretrained(folder)
    sides = {"height": side, "width": side}
    transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size=sides).save_pretrained(folder)
    return load_encoder(folder, device)


def make_inputs(encoder: Encoder, side: int, count: int) -> tuple[Benchmark, Prepared]:
    """Makes images of noise, in one task."""
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    names = tuple(f"class {k}" for k in range(CLASSES))
    labels = tuple(k % CLASSES for k in range(count))
    samples = Samples(
        "noise", "image", count, lambda positions: (Image.fromarray(pixels[k]) for k in positions), names, labels
    )
    task = Task("noise", tuple(range(CLASSES)), tuple(range(count)), ())
    benchmark = Benchmark("noise", "image", names, samples, samples, (task,), "class", {}, None)
    return benchmark, prepare(encoder, samples)


def loop_seconds(encoder: Encoder, benchmark: Benchmark, inputs: Prepared, options: Optimisation) -> float:
    """Returns the seconds of a step of the loop, without its first epoch."""
    head = Head.of(np.eye(CLASSES, encoder.dim), benchmark.classes, 20.0)
    section = BenchmarkOptions.read({"name": "glyphs", "tasks": 1}, Path())
    trainer = Trainer(encoder, head, benchmark, TrainConfig("noise", section, train=options))
    times: list[float] = []
    trainer.train(0, inputs, watch=lambda tick: times.append(time.perf_counter()))
    skipped = len(times) // options.epochs
    return (times[-1] - times[skipped]) / (options.log_every * (len(times) - 1 - skipped))


def bare_seconds(encoder: Encoder, inputs: Prepared, options: Optimisation, steps: int) -> float:
    """Returns the seconds of a step on one batch that is ready."""
    step = Step(encoder, [(n, p) for n, p in encoder.module.named_parameters() if p.requires_grad], options, None)
    batch = inputs.batch(list(range(options.batch)))
    assert inputs.labels is not None
    targets = inputs.labels[: options.batch]
    weight = 20 * torch.eye(CLASSES, encoder.dim, device=inputs.device)
    gpu = inputs.device.type == "cuda"
    with torch.cuda.stream(torch.cuda.Stream() if gpu else None):
        for _ in range(5):
            step(batch, targets, weight, 1e-5)
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            step(batch, targets, weight, 1e-5)
        if gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps


def matrix_rate(device: str) -> float:
    """Returns the operations a second of a large bfloat16 product."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - start)


def operations(encoder: Encoder, size: str, batch: int) -> float:
    """Returns the operations of a step's matrix products: forward once, backward twice."""
    side, patch, width, depth, _ = SIZES[size]
    tokens = (side // patch) ** 2 + 1
    matrices = sum(p.numel() for p in encoder.module.parameters() if p.ndim >= 2)
    return 3 * batch * (2 * matrices * tokens + 4 * depth * tokens**2 * width)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=None, help="default: 400 on a GPU, 8 elsewhere")
    parser.add_argument("--compile", action="store_true", help="as train.compile")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = arguments.steps or (400 if device == "cuda" else 8)
    per_epoch = max(1, steps // 4)
    options = Optimisation(
        epochs=5,
        batch=arguments.batch,
        warmup=1,
        augment="crop+flip",
        log_every=per_epoch,
        compile=arguments.compile,
    )
    with tempfile.TemporaryDirectory() as folder:
        encoder = make_encoder(arguments.size, device, Path(folder) / "model")
    benchmark, inputs = make_inputs(encoder, SIZES[arguments.size][0], arguments.batch * per_epoch)
    loop = loop_seconds(encoder, benchmark, inputs, options)
    bare = bare_seconds(encoder, inputs, options, per_epoch)
    where = torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{arguments.size} on {where}, batch {arguments.batch}")
    print(f"  loop   {arguments.batch / loop:9,.0f} images/s  {1e3 * loop:8.2f} ms a step")
    print(f"  bare   {arguments.batch / bare:9,.0f} images/s  {1e3 * bare:8.2f} ms a step")
    print(f"  loop / bare {loop / bare:.2f}")
    if device == "cuda":
        share = operations(encoder, arguments.size, arguments.batch) / bare / matrix_rate(device)
        print(f"  the step's products run at {share:.0%} of the speed of large ones")


if __name__ == "__main__":
    main()
