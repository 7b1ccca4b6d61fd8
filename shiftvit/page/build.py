"""The page as gradio blocks, and its server."""

import html
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor

from common.publishing.quotas import Quotas

from .move import SCALE, draw
from .sides import Side, draw_pixels, load_examples, read_upload

__all__ = ["build_page", "serve"]

# what one stranger, or all of them, may ask of the page
MAX_BYTES = 2**24  # of a file
JOBS_PER_CLIENT, JOBS = 8, 64  # that wait or run

HERE = Path(__file__).resolve().parent
CHOOSE = """element.addEventListener("click", (event) => {
  const chosen = event.target.closest("button");
  if (chosen) trigger("select", {index: Number(chosen.dataset.index), value: null});
});"""
INTRO = """# Move the image
Use the sliders or the **arrow keys**: what leaves the image on one side comes back on the other. Both models have
the same architecture; the adaptive one anchors its tokens."""
LEGEND = f"""Bars: probabilities in percent; an orange mark is where the bar ends before the image moves. Token errors:
how far each token has gone from what it was in place, in units of a typical token; black is 0, the brightest {SCALE} or
more. The embedded models know light digits on dark ground."""


def build_page(sides: tuple[Side, Side]) -> Any:
    """The page as gradio blocks: all that is shown comes from ``draw``; the buttons that the arrow keys press move the
    sliders in the browser, and whatever moves a slider redraws."""
    import gradio as gr

    preprocess = sides[0].preprocess
    height, width = preprocess.size
    examples = load_examples(preprocess)
    quiet: dict[str, Any] = dict(show_progress="hidden", api_visibility="private")

    def redraw(image: Tensor, dx: float, dy: float) -> tuple[str, str]:
        return draw(sides, image, int(dx), int(dy))

    def choose(event: gr.SelectData) -> Tensor:
        return examples[event.index]

    def upload(content: bytes, image: Tensor) -> Tensor:
        try:
            return read_upload(content, preprocess)
        except ValueError as error:
            gr.Warning(html.escape(str(error)), duration=30)
            return image

    with gr.Blocks(title="Shift-equivariant vision transformers", fill_width=True, analytics_enabled=False,
                   delete_cache=(600, 600)) as page:  # fmt: skip
        gr.Markdown(INTRO)
        image = gr.State(examples[0])
        picture, cards = draw(sides, examples[0], 0, 0)
        with gr.Row():
            with gr.Column(scale=2, min_width=280):
                view = gr.HTML(picture, elem_id="view")
                dx, dy = (
                    gr.Slider(-(side // 2), side - side // 2 - 1, 0, step=1, label=label, elem_id=name, buttons=[])
                    for name, label, side in (("dx", "dx: right", width), ("dy", "dy: down", height))
                )
                with gr.Row():
                    for name, sign, right, down in (("left", "◀", -1, 0), ("up", "▲", 0, -1), ("reset", "reset", 0, 0),
                                                    ("down", "▼", 0, 1), ("right", "▶", 1, 0)):  # fmt: skip
                        to = f"{step('dx', right, width)}, {step('dy', down, height)}" if right or down else "0, 0"
                        button = gr.Button(sign, elem_id=name, min_width=20, size="sm")
                        button.click(None, [dx, dy], [dx, dy], js=f"(dx, dy) => [{to}]", **quiet)
                own = gr.UploadButton("Upload an image", type="binary", file_types=["image"], size="sm")
            with gr.Column(scale=5, min_width=320):
                buttons = (f'<button data-index="{i}">{draw_pixels(example, f"example {i}")}</button>'
                           for i, example in enumerate(examples))  # fmt: skip
                strip = gr.HTML("".join(buttons), js_on_load=CHOOSE, elem_id="examples")
                panels = gr.HTML(cards, elem_id="panels")
                gr.Markdown(LEGEND)
        checked = f"(image, dx, dy) => [image, {step('dx', 0, width)}, {step('dy', 0, height)}]"
        follow: dict[str, Any] = dict(fn=redraw, inputs=[image, dx, dy], outputs=[view, panels], js=checked, **quiet)
        gr.on([dx.change, dy.change], trigger_mode="always_last", **follow)
        every: dict[str, Any] = dict(trigger_mode="multiple")  # else what comes while one is drawn is dropped
        strip.select(choose, None, image, **every, **quiet).then(**every, **follow)
        own.upload(upload, [own, image], image, **every, **quiet).then(**every, **follow)
        page.load(None, js=(HERE / "page.js").read_text())
    return page


def step(name: str, by: int, side: int) -> str:
    """JavaScript: a slider's value moved by ``by``, back on the other side as the image is. Whatever was typed beside
    the slider (nothing, a fraction, too much) becomes a shift."""
    half = side // 2
    return f"((Math.round({name}) || 0) % {side} + {by + half + side}) % {side} - {half}"


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
