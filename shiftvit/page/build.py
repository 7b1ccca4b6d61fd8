"""The page as gradio blocks, and its server."""

import html
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from common.publishing.quotas import Quotas

from .controls import EVERY, QUIET, build_mover, build_strip
from .masks import OPENING_SCENE, Segmenter, draw_masks, draw_names, load_scene_images
from .move import OPENINGS, SCALE, choose_opening, draw
from .pan import REACH_DIGITS, REACH_PHOTOGRAPHS, Pan, choose_pan, digit_scene, draw_pan, glide, photograph_scene
from .sides import Side, fit, load_examples, load_photographs, read_upload

__all__ = ["PAPER", "build_page", "serve"]

# what one stranger, or all of them, may ask of the page
MAX_BYTES = 2**24  # of a file
JOBS_PER_CLIENT, JOBS = 8, 64  # that wait or run

FILE: dict[str, Any] = dict(type="binary", file_types=["image"], size="sm")
HERE = Path(__file__).resolve().parent
PAPER = "https://arxiv.org/abs/2305.16316"
TITLE = "Move an image: a default vision transformer changes its answer, its shift-equivariant twin keeps it"
MOVE = """Drag the image, or use the **arrow keys** or the sliders. Both models have the same architecture; the adaptive
one anchors its tokens to the image. Under circular shifts it gives the same answer, to the last bit."""
LEGEND = f"""Bars: probabilities in percent; an orange mark is where the bar ends before the image moves. Token errors:
how far each token has gone from what it was in place, in units of a typical token; black is 0, the brightest {SCALE} or
more, grey what came in with a standard shift."""
PAN = """A window glides over a larger picture, as a camera does: what leaves it is gone, what enters is new. Here no
model can be exact, but an answer should not hang on a small step. Choose a picture, or upload a large one. The curves
are of one class: that of the digit in the middle or, in a photograph, the one that both models together find likeliest.
A model is marked green while its label is that class."""
SEGMENTATION = """A label for every pixel. The scene moves, each model labels it, and its mask is shifted back: it
should be the mask in place. Pixels whose label changed are red."""
SHARED = " Both models have the same weights, trained with anchors; the default one works without them."

Sides = tuple[Side, Side]


def build_page(sources: Mapping[str, Sides], segmenters: tuple[Segmenter, Segmenter],
               links: Mapping[str, str] | None = None) -> Any:  # fmt: skip
    """The page. ``sources``: a default and an adaptive model for each kind of images, by its name; the page opens with
    the first. ``links`` are shown below the title, by name."""
    import gradio as gr

    with gr.Blocks(title="Shift-equivariant vision transformers", fill_width=True, analytics_enabled=False,
                   delete_cache=(600, 600)) as page:  # fmt: skip
        shown = (f'<a href="{html.escape(url)}" target="_blank" rel="noopener">{html.escape(name)}</a>'
                 for name, url in {"paper": PAPER, **(links or {})}.items())  # fmt: skip
        gr.HTML(f"<h1>{TITLE}</h1><nav>{' · '.join(shown)}</nav>", elem_id="title")
        with gr.Tabs():
            with gr.Tab("move"):
                build_sources("move", sources, build_move)
            with gr.Tab("pan"):
                build_sources("pan", sources, build_pan)
            with gr.Tab("segmentation"):
                build_segmentation(segmenters)
        page.load(None, js=(HERE / "page.js").read_text())
    return page


def build_sources(tab: str, sources: Mapping[str, Sides], build: Callable[[str, Sides], None]) -> None:
    """A part for every source, by ids ``source-tab-...``; the one that is chosen is there to see."""
    import gradio as gr

    first, *others = sources
    choice = gr.Radio([first, *others], value=first, show_label=False, visible=bool(others), elem_id=f"{tab}-source")
    parts = []
    for name, sides in sources.items():
        with gr.Column(visible=name == first) as part:
            build(f"{name}-{tab}", sides)
        parts.append(part)

    def show(chosen: str) -> list[Any]:
        return [gr.Column(visible=name == chosen) for name in sources]

    if others:
        choice.change(show, choice, parts, **EVERY, **QUIET)


def build_move(name: str, sides: Sides) -> None:
    import gradio as gr

    preprocess, examples = sides[0].preprocess, load_examples(sides[0])
    start, dx, dy = choose_opening(sides[0], examples)

    def redraw(image: Tensor, dx: float, dy: float, kind: str) -> tuple[str, str]:
        return draw(sides, image, int(dx), int(dy), kind)

    def choose(event: gr.SelectData) -> Tensor:
        return examples[chosen(event)]

    def upload(content: bytes) -> tuple[Tensor, int, int]:
        return fit(opened(content), preprocess), 0, 0  # a new image begins in place

    image = gr.State(examples[start])
    picture, cards = draw(sides, examples[start], dx, dy)
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            mover = build_mover(name, picture, preprocess.size, dx, dy)
            own = gr.UploadButton("Upload an image", **FILE)
        with gr.Column(scale=5, min_width=320):
            strip, chosen = build_strip(name, examples)
            panels = gr.HTML(cards, elem_id=f"{name}-panels")
            gr.Markdown(f"{MOVE} {sides[0].scope}\n\n{LEGEND}")
    follow = mover.follow(redraw, image, [mover.view, panels])
    strip.select(choose, None, image, **EVERY, **QUIET).then(**follow)
    own.upload(upload, own, [image, mover.dx, mover.dy], **EVERY, **QUIET).success(**follow)


def build_pan(name: str, sides: Sides) -> None:
    import gradio as gr

    preprocess, digits = sides[0].preprocess, sides[0].knows_digits
    photographs = load_photographs()
    examples = load_examples(sides[0]) if digits else [fit(photo, preprocess) for photo in photographs]

    def over_example(index: int) -> Pan:
        if digits:
            return glide(sides, digit_scene(examples, index), REACH_DIGITS, index)
        return over_photograph(photographs[index])

    def over_photograph(pixels: np.ndarray) -> Pan:
        return glide(sides, photograph_scene(pixels, preprocess.size), REACH_PHOTOGRAPHS)

    def choose(event: gr.SelectData) -> str:
        return draw_pan(sides, over_example(chosen(event)))

    def upload(content: bytes) -> str:
        return draw_pan(sides, over_photograph(opened(content)))

    opening = choose_pan(map(over_example, range(len(examples))))
    with gr.Row():
        with gr.Column(scale=5, min_width=320):
            panel = gr.HTML(draw_pan(sides, opening), elem_id=f"{name}-panel")
        with gr.Column(scale=1, min_width=280):
            strip, chosen = build_strip(name, examples)
            own = gr.UploadButton("Upload a large picture", **FILE)
            gr.Markdown(PAN)
    strip.select(choose, None, panel, **EVERY, **QUIET)
    own.upload(upload, own, panel, **EVERY, **QUIET)


def build_segmentation(sides: tuple[Segmenter, Segmenter]) -> None:
    import gradio as gr

    scenes = load_scene_images()
    dx, dy = OPENINGS[0]

    def redraw(image: Tensor, dx: float, dy: float, kind: str) -> tuple[str, str]:
        return draw_masks(sides, image, int(dx), int(dy), kind)

    def choose(event: gr.SelectData) -> Tensor:
        return scenes[chosen(event)]

    image = gr.State(scenes[OPENING_SCENE])
    picture, cards = draw_masks(sides, scenes[OPENING_SCENE], dx, dy)
    with gr.Row():
        with gr.Column(scale=2, min_width=280):
            mover = build_mover("masks", picture, (scenes[0].shape[2], scenes[0].shape[3]), dx, dy)
        with gr.Column(scale=5, min_width=320):
            strip, chosen = build_strip("masks", scenes)
            panels = gr.HTML(cards, elem_id="masks-panels")
            gr.HTML(draw_names(sides[0].model.class_names))
            weights = (side.model.state_dict().values() for side in sides)
            shared = all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(*weights, strict=False))
            gr.Markdown(SEGMENTATION + (SHARED if shared else ""))
    strip.select(choose, None, image, **EVERY, **QUIET).then(**mover.follow(redraw, image, [mover.view, panels]))


def opened(content: bytes) -> np.ndarray:
    """A stranger's image, or a sentence on the page that says what is wrong with it."""
    import gradio as gr

    try:
        return read_upload(content)
    except ValueError as error:
        raise gr.Error(html.escape(str(error)), duration=30) from None


def count_jobs(page: Any) -> Counter[str]:
    """What waits in the page's queue and what runs, by client."""
    queue = page._queue
    events = [event for each in queue.event_queue_per_concurrency_id.values() for event in each.queue]
    events += [event for job in queue.active_jobs if job is not None for event in job]
    return Counter(event.request.client.host if event.request.client else "" for event in events)


def serve(page: Any, host: str, port: int) -> None:
    """Start the page's server, in a thread, within the quotas."""
    import gradio as gr
    from starlette.middleware import Middleware

    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    quotas = Middleware(Quotas, jobs=lambda: count_jobs(page), max_bytes=MAX_BYTES + 2**16, per_client=JOBS_PER_CLIENT,
                        in_all=JOBS)  # fmt: skip
    page.launch(server_name=host, server_port=port, share=False, ssr_mode=False, max_file_size=MAX_BYTES,
                footer_links=[], theme=theme, css=(HERE / "page.css").read_text(), quiet=True, prevent_thread_lock=True,
                app_kwargs={"middleware": [quotas]})  # fmt: skip
