"""One HTML page of a run that needs no other file: tables, and the pictures inside it."""

import base64
import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mimo_jax.train.report.curves import PANELS
from mimo_jax.train.report.record import RunRecord, Stage

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 2rem auto;
  max-width: 78rem; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(34rem, 1fr)); gap: 1rem; }
.figures img { width: 100%; } .tables { display: flex; flex-wrap: wrap; gap: 2.5rem; }
table { border-collapse: collapse; font-size: 14px; } caption { text-align: left; color: #666; }
th { text-align: left; font-weight: 600; } th, td { padding: .2rem .9rem .2rem 0;
  border-bottom: 1px solid #eee; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f6; padding: 1rem; overflow: auto; font-size: 13px; }
.progress { color: #666; }
"""


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table; numbers to the right."""

    def cell(value: Any) -> str:
        is_number = value is None or isinstance(value, int | float)
        return f'<td{" class=number" if is_number else ""}>{html.escape(_text(value))}</td>'

    lines = "".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in rows)
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    top = f"<tr>{titles}</tr>" if head else ""
    return f"<table><caption>{html.escape(caption)}</caption>{top}{lines}</table>"


def _accept_lengths(stage: Stage) -> str:
    table = stage.accept_table()
    if not table:
        return ""
    kinds = ("heldout", "real")
    has = {kind: any(f"{kind}_accept_length" in row for row in table.values()) for kind in kinds}
    alphas = {
        scene: row.get("real_acceptance") or row.get("heldout_acceptance") or ()
        for scene, row in table.items()
    }
    depth = max(map(len, alphas.values()))
    titles = {"heldout": "τ simulated", "real": "τ decoded"}
    head = ["scene", *(titles[kind] for kind in kinds if has[kind])]
    head += [f"α{i}" for i in range(1, depth + 1)]
    rows = [
        [
            scene,
            *(row.get(f"{kind}_accept_length") for kind in kinds if has[kind]),
            *alphas[scene],
            *[None] * (depth - len(alphas[scene])),
        ]
        for scene, row in table.items()
    ]
    return _table("Newest evaluation, by scene", head, rows)


def _stage(stage: Stage, pictures: dict[str, Path]) -> str:
    images = "".join(
        f'<img alt="{html.escape(stage.name)}: {PANELS[name][0]}" '
        f'src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'
        for name, path in pictures.items()
    )
    numbers = {k: v for k, v in stage.final_figures().items() if "accept" not in k or "/" not in k}
    if stage.seconds_per_step is not None:
        numbers["seconds per step, median"] = stage.seconds_per_step
    return (
        f"<h2>{html.escape(stage.name)}</h2><p class=progress>{html.escape(stage.progress)}</p>"
        f"<div class=tables>{_accept_lengths(stage)}"
        f"{_table('Newest figures', [], numbers.items())}</div><div class=figures>{images}</div>"
    )


def write_page(record: RunRecord, pictures: dict[str, dict[str, Path]], path: Path) -> None:
    """Writes the page.

    Args:
      record: Of the run.
      pictures: Stage -> panel -> PNG file; copied into the page.
      path: Of the page.
    """
    made = {name: value for name, value in record.provenance.items() if name != "config"}
    packages = made.pop("packages", {})
    rows = [
        (name, " ".join(value) if isinstance(value, list) else str(value))
        for name, value in made.items()
    ]
    rows += [(name, str(version)) for name, version in packages.items()]
    config = record.provenance.get("config")
    name = (config or {}).get("name") or record.run_dir.name
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{html.escape(name)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(name)}</h1><p class=progress>{html.escape(str(record.run_dir))}</p>",
        *(_stage(stage, pictures[stage.name]) for stage in record.stages),
    ]
    if rows:
        parts.append(f"<h2>Provenance</h2>{_table('What made this run', [], rows)}")
    if config:
        text = html.escape(json.dumps(config, indent=1))
        parts.append(f"<h2>Config</h2><details><summary>JSON</summary><pre>{text}</pre></details>")
    path.write_text("\n".join(parts) + "</html>\n", encoding="utf-8")
