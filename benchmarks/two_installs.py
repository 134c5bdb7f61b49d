"""Whether two fresh installs give one text: two venvs, one with ten more packages, and the hashes of what they embed.

    python benchmarks/two_installs.py [--json benchmarks/results/two_installs.json]

Takes the packages from where pip is set up to take them, some 4 GB of disk and ten minutes. Exits 1 where a hash
differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from bench import ROOT, keep, parser

TEN_MORE = "attrs requests click jinja2 scipy rich pytz docutils simplejson tabulate".split()
HASHES = """
import hashlib, json
from sinkutils.study import corpus, sources
found = {"versions": corpus.text_versions()}
for name, documents in corpus.EMBEDDED.items():
    digest, count, characters = hashlib.sha256(), 0, 0
    for text in documents():
        digest.update(sources.text_digest(text))
        count, characters = count + 1, characters + len(text)
    found[name] = {"documents": count, "characters": characters, "sha256": digest.hexdigest()}
print(json.dumps(found))
"""


def hashes(folder: Path, more: list[str]) -> dict[str, object]:
    """Install the project and `more` into a new venv below `folder`; what its texts are there."""
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "--editable", f"{ROOT}[text]", *more], check=True)
    out = subprocess.run(
        [python, "-c", HASHES], check=True, capture_output=True, text=True, cwd=folder
    )
    return json.loads(out.stdout)


def main() -> int:
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, more = (
            hashes(Path(folder, name), extra) for name, extra in (("plain", []), ("more", TEN_MORE))
        )
    for name in plain:
        print(f"{'same' if plain[name] == more[name] else 'DIFFERENT'}: {name} {plain[name]}")
    keep(options.json, {"plain": plain, "more": more})
    return int(plain != more)


if __name__ == "__main__":
    sys.exit(main())
