"""Make two pages of the site, index.md and changelog.md, from files of the root.

mkdocs.yml names this file, and mkdocs calls ``on_files`` before it reads the pages.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages.

    A link of README.md to a file that is not in the site becomes plain text.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    readme = readme.replace("](CHANGELOG.md)", "](changelog.md)")
    readme = re.sub(r"\[([^\]]+)\]\([A-Z]+\.md\)", r"\1", readme)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "changelog.md", content=changelog))
    return files
