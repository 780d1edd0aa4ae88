"""One HTML file that opens without a network: its policy allows only its own scripts and styles, by their hashes."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence

from plait.checkpoint.files.writing import finite

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width"><title>{title}</title>{styles}</head>
<body>{body}
<script type="application/json" id="data">{data}</script>{scripts}</body></html>
"""


def document(title: str, body: str, styles: Sequence[str], scripts: Sequence[str], data: object) -> str:
    """Returns the text of the file.  The data is for ``document.getElementById("data")``; numbers that JSON lacks are
    null there.  The body is HTML that plait writes; nothing in it may come from outside."""
    text = json.dumps(finite(data), separators=(",", ":"), allow_nan=False)
    policy = (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; base-uri 'none'; "
        f"form-action 'none'"
    )
    return PAGE.format(
        policy=policy,
        title=html.escape(title),
        styles="".join(f"<style>{one}</style>" for one in styles),
        body=body,
        data=text.replace("<", "\\u003c").replace("&", "\\u0026"),
        scripts="".join(f"<script>{one}</script>" for one in scripts),
    )


def _hashes(texts: Sequence[str]) -> str:
    """The sources of a policy that allows these texts and no others."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
