"""The note in each workflow: what it does, which files, what it takes, what to change first."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...charts.figures import duration
from ...charts.words import usable_bytes
from ...planning.cards import BUNDLED, Card, find_card, known_cards
from ...planning.estimator import estimate
from ...planning.memory import format_gib
from ...planning.wish import Wish
from .models import ModelFile


def note(
    title: str,
    what: str,
    change: Sequence[str],
    *,
    files: Sequence[ModelFile] = (),
    wish: Wish | None = None,
) -> str:
    """Markdown.

    Args:
        what: it does, in a sentence or two.
        change: what to change first, a sentence each.
        files: that have to be downloaded.
        wish: what the workflow runs, for what it takes of an L40S.
    """
    parts = [f"## {title}", what]
    if files:
        lines = [f"- [{file.name}]({file.url}){_size(file)}" for file in files]
        folders = [f"  in `models/{file.directory}`" for file in files]
        both = [text for pair in zip(lines, folders, strict=True) for text in pair]
        parts.append("\n".join(["**Files**", "", *both]))
    if wish:
        parts.append(f"**What it takes**\n\n{takes(wish)}")
    parts.append("\n".join(["**Change first**", "", *(f"- {sentence}" for sentence in change)]))
    return "\n\n".join(parts) + "\n"


def takes(wish: Wish) -> str:
    """Memory and time on an L40S, as `qwen-l40s estimate` says them; nothing is typed."""
    found = estimate(wish, _l40s())
    option = found.option
    peak, usable = format_gib(option.peak_bytes), format_gib(usable_bytes(found))
    fits = "fits" if found.fits else "does not fit"
    sentences = [f"On an L40S, predicted: {peak} of {usable} to use, so it {fits}."]
    if option.setting.modulation == "off card":
        sentences.append("Modulation weights wait in host memory.")
    if option.setting.text_encoder_place == "drop after encoding":
        sentences.append("The text encoder leaves the card after encoding.")
    if option.tiles > 1:
        sentences.append(f"The VAE decodes in {option.tiles} tiles.")
    if found.image_seconds is not None:
        size = f"{wish.width}x{wish.height}"
        if wish.batch > 1:
            whole = duration(found.image_seconds.times(wish.batch))
            sentences.append(f"{wish.batch} images of {size}: {whole}.")
        else:
            sentences.append(f"An image of {size}: {duration(found.image_seconds)}.")
    return " ".join(sentences)


@functools.cache
def _l40s() -> Card:
    # The list that comes with the package: a list of the user's own decides no file.
    return find_card("L40S", known_cards(BUNDLED))


def _size(file: ModelFile) -> str:
    return "" if file.gb is None else f", {file.gb:g} GB"
