"""Train UperNet: ``accelerate launch segmentation/train.py [--recipe NAME] [--model NAME] [--data NAME_OR_DIR] ...``"""

import shiftvit  # first: it says so where another 'common' hides ours
from common.training.engine import main
from segmentation.recipes import RECIPES
from segmentation.task import Segmentation

if __name__ == "__main__":
    shiftvit.run(main, RECIPES, default="digits", description=__doc__, task=Segmentation)
