"""`python -m swinv2_moe.detection.install LOG` runs tools/install_detection.py of this clone."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    script = Path(__file__).parents[2] / "tools" / "install_detection.py"
    runpy.run_path(str(script), run_name="__main__")
