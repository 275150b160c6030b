"""The package is cheap to import: what only some sources need loads when used."""

import subprocess
import sys


def test_importing_the_room_loads_no_heavy_library() -> None:
    heavy = "{'pyarrow', 'datasets', 'lightning', 'transformers', 'pandas', 'tokenizers', 'sentencepiece'}"
    code = f"import sys, llmstack.data; print(*({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
