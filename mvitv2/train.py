"""Train MViTv2: ``accelerate launch mvitv2/train.py [--recipe NAME] [--model NAME] [--data NAME_OR_DIR] ...``"""

import shiftvit  # first: it says so where another 'common' hides ours
from common.training.engine import main
from mvitv2.recipes import RECIPES

if __name__ == "__main__":
    shiftvit.run(main, RECIPES, default="digits", description=__doc__)
