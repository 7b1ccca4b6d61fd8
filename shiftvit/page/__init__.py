"""The page of ``scripts/app.py``: a default and an adaptive model, side by side, on images that move."""
