"""Training: recipes, the loop, tasks, checkpoints, and a folder's ``reproduce.py``."""
