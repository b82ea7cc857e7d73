"""Files for readers: a text, and a folder of pictures for each class."""

from pathlib import Path

from models import tiny


def written(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return path


def folder(root: Path, **classes: int) -> Path:
    """So many pictures of each class, none like another."""
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for k in range(count):
            tiny.picture((10 * k, len(name), sum(map(ord, root.name + name)) % 256), k).save(root / name / f"{k}.png")
    return root
