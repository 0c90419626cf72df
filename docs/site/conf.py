"""Settings of the site: `make site` builds it with Sphinx from the documents of the whole repository."""

from areal_rloo import __version__

project = "areal-rloo"
version = release = __version__
extensions = ["myst_parser"]
include_patterns = ["*.md", "docs/*.md", "benchmarks/results/*.md", "benchmarks/results/gpu/*.md"]
root_doc = "docs/index"
html_theme = "furo"
myst_heading_anchors = 3
