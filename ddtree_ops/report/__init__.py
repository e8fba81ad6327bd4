"""A run's records as Markdown, one self-contained HTML page and SVG files. The same records give the same bytes."""
