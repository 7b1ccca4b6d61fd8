"""``python -m shiftvit``: the command ``shiftvit``."""

from shiftvit.command import main

if __name__ == "__main__":
    main()
