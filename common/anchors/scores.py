"""The family of scores: what an anchor looks at, and all that it needs. A new one is a line of ``SCORES``."""

from dataclasses import dataclass

__all__ = ["SCORES", "Score", "find_score"]


@dataclass(frozen=True)
class Score:
    """How the phases m of a grid are scored; the anchor takes the best. Any shift-invariant function makes it exact.

    With ``needs_layer``, what counts is t, the output of the layer behind the anchor, taken at every position:

        score(m) = sum over tokens t of phase m of |t|^2 + 0.1 tie_break rms <r, t>,   r a fixed unit vector

    Without, and always where windows are chosen, what counts is x, the tokens or pixels that come in. Windows are those
    of the attention, or the patches of a stride:

        strength(x) = |x| + tie_break <r, x>
        v           = mean of strength over a window, uneven by ``tie_break``
        score(m)    = sum over windows of the partition at m of v^power
    """

    name: str
    needs_layer: bool = False
    tie_break: float = 0.1  # energy cannot tell t from -t, nor where in its window a bright token sits
    power: int = 2


SCORES = {
    score.name: score
    for score in (
        Score("energy", needs_layer=True, tie_break=0.0),  # the paper's, with sketch=0
        Score("signed", needs_layer=True),  # its ties broken
        Score("fixed"),
        Score("peak", power=64),  # the strongest patch decides: what enters at a border hardly matters
    )
}


def find_score(name: str) -> Score:
    if name not in SCORES:
        raise ValueError(f"unknown score {name!r}: choose one of {tuple(SCORES)}")
    return SCORES[name]
