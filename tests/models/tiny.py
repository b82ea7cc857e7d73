"""Tiny models with random weights, saved as their real ones are: config.json, weights, and processor or tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
PATCHES = {"image_size": 16, "patch_size": 8}
PLACES = {"vocab_size": 16, "max_position_embeddings": 24}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**SIZES, "num_hidden_layers": 2, **PATCHES}
TEXT = {**SIZES, "num_hidden_layers": 2, "vocab_size": 16, "max_position_embeddings": 12, **TOKENS}
TEXTS, IMAGES = {**SIZES, **PLACES}, {**SIZES, **PATCHES}
CLASSIFIERS = {
    "bert": TEXTS,
    "distilbert": {**PLACES, "dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2},
    "roberta": TEXTS,
    "electra": {**TEXTS, "embedding_size": 16},
    "deberta": {**TEXTS, "pooler_hidden_size": 16},
    "vit": IMAGES,
    "deit": IMAGES,
    "gpt2": {"vocab_size": 16, "n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2, **TOKENS},
    "llama": {**TEXTS, "num_key_value_heads": 2, **TOKENS},
    "modernbert-decoder": {**TEXTS, **TOKENS},
}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "good", "bye", "pay", "my", "bill", "##s", "card")
PIXELS = {
    "do_resize": True,
    "size": {"height": 16, "width": 16},
    "resample": 2,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.25, 0.25, 0.25],
}


def build(kind: str):
    """A model of one kind, seeded."""
    import transformers as tf

    torch.manual_seed(sum(map(ord, kind)))
    pair = {"vision_config": VISION, "text_config": TEXT}
    return {
        "clip": lambda: tf.CLIPModel(tf.CLIPConfig(**pair, projection_dim=8)),
        "clip-vision": lambda: tf.CLIPVisionModelWithProjection(tf.CLIPVisionConfig(**VISION, projection_dim=8)),
        "clip-tower": lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**VISION)),
        "siglip": lambda: tf.SiglipModel(tf.SiglipConfig(**pair)),
        "siglip-vision": lambda: tf.SiglipVisionModel(tf.SiglipVisionConfig(**VISION)),
        "vit": lambda: tf.ViTModel(tf.ViTConfig(**VISION)),
        "vit-classifier": lambda: tf.ViTForImageClassification(tf.ViTConfig(**VISION, num_labels=3)),
        "bert": lambda: tf.BertModel(tf.BertConfig(**TEXT)),
        "bert-masked": lambda: tf.BertForMaskedLM(tf.BertConfig(**TEXT)),
    }[kind]().eval()


def classifier(kind: str, labels: Sequence[str] | None, seed: int = 0, architecture: str | None = None):
    """A random classifier with these labels; without labels, the bare model."""
    import transformers as tf

    ids = (
        {}
        if labels is None
        else {"id2label": dict(enumerate(labels)), "label2id": {n: k for k, n in enumerate(labels)}}
    )
    config = tf.AutoConfig.for_model(kind, **CLASSIFIERS[kind], **ids)
    torch.manual_seed(seed)
    images = {"vit": "ViTForImageClassification", "deit": "DeiTForImageClassification"}
    if named := architecture or (labels and images.get(kind)):
        return getattr(tf, named)(config)
    return (tf.AutoModelForSequenceClassification if labels else tf.AutoModel).from_config(config)


def save(model, folder: Path, companions: bool = True) -> Path:
    """As transformers saves it, with what prepares its inputs."""
    import json

    import transformers
    from transformers import BertTokenizerFast

    model.save_pretrained(folder)
    if companions:
        kind = {"clip": "CLIP", "sigl": "Siglip"}.get(model.config.model_type[:4], "ViT")
        if hasattr(model.config, "vision_config") or model.main_input_name == "pixel_values":
            told = {"image_processor_type": f"{kind}ImageProcessor", **PIXELS}
            if kind == "CLIP":
                told["do_center_crop"] = False
            (folder / "preprocessor_config.json").write_text(json.dumps(told))
        if model.main_input_name == "input_ids":
            (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
            given = "vocab" if int(transformers.__version__.split(".")[0]) >= 5 else "vocab_file"
            BertTokenizerFast(**{given: str(folder / "vocab.txt")}).save_pretrained(folder)
    return folder


def changed(model, amount: float = 0.3, seed: int = 1):
    """The same model after "training": every parameter moved."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += amount * torch.randn(parameter.shape, generator=generator)
    return model


def picture(colour: tuple[int, int, int], seed: int = 0, size: int = 20):
    """A noisy image around one colour."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(-30, 31, (size, size, 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))
