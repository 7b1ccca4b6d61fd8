"""Train Swin: ``accelerate launch swin/train.py [--recipe NAME] [--model NAME] [--data NAME_OR_DIR] ...``"""

from common.training.engine import main
from swin.recipes import RECIPES

if __name__ == "__main__":
    main(RECIPES, default="digits", description=__doc__)
