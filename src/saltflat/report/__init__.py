"""From plain records of what was measured to tables, pictures and one self-contained page."""

try:
    import jinja2  # noqa: F401
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError("reports and pictures need: pip install 'saltflat[report]'") from error
