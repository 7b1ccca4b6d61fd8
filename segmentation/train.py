"""Train UperNet: ``accelerate launch segmentation/train.py [--recipe NAME] [--model NAME] [--data NAME_OR_DIR] ...``"""

from common.training.engine import main
from segmentation.recipes import RECIPES
from segmentation.task import Segmentation

if __name__ == "__main__":
    main(RECIPES, default="digits", description=__doc__, task=Segmentation)
