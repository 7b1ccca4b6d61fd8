"""Train SwinV2: ``accelerate launch swinv2/train.py [--recipe NAME] [--model NAME] [--data NAME_OR_DIR] ...``"""

from common.training.engine import main
from swinv2.recipes import RECIPES

if __name__ == "__main__":
    main(RECIPES, default="digits", description=__doc__)
