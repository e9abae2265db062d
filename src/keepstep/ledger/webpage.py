"""The account as one HTML file: tiles, four pictures, the list of incidents. Pure.

No script, no font, no image, no other host: it can be mailed, archived and printed, and shows the
same in ten years. Light and dark follow the reader's system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from keepstep.ledger import plots, report
from keepstep.ledger.account import Account, IncidentAccount, Saved

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c2024;--dim:#5f6872;--line:#dde1e6;--card:#f6f7f9;
--useful:#2e9e5b;--lost:#e0912f;--move1:#9ec5f3;--move2:#6aa7ea;--move3:#3d86d8;--move4:#2163b0;
--move5:#123f7d;--held:#8a5cc7;--bad:#d43d3d;--declared:#3aa6a0;--quiet:#aab2bb;--unpaid:#e3e6ea}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e8eaed;--dim:#9aa3ad;--line:#343a41;
--card:#1d2125;--useful:#3fb871;--lost:#eba64f;--move1:#bcd8f8;--move2:#86b9f0;--move3:#5a9be6;
--move4:#3b7dcc;--move5:#2c62a8;--held:#a67fe0;--bad:#ee5f5f;--declared:#4fbdb7;--quiet:#6d7680;
--unpaid:#3b4148}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1060px;padding:24px 20px 60px;background:var(--bg);color:var(--fg);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0 0 2px}h2{font-size:16px;margin:34px 0 8px}
p{margin:6px 0}.dim{color:var(--dim)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;margin:20px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
.tile b{display:block;font-size:26px;line-height:1.2}.tile.good b{color:var(--useful)}
.tile.wrong b{color:var(--bad)}.tile span{color:var(--dim);font-size:13px}
svg{width:100%;height:auto;display:block}svg text{font:12px system-ui,sans-serif;fill:var(--dim)}
.useful{fill:var(--useful)}.lost{fill:var(--lost)}.move1{fill:var(--move1)}.move2{fill:var(--move2)}
.move3{fill:var(--move3)}.move4{fill:var(--move4)}.move5{fill:var(--move5)}.held{fill:var(--held)}
.bad{fill:var(--bad)}.declared{fill:var(--declared)}.quiet{fill:var(--quiet)}
.unpaid{fill:var(--unpaid)}.grid{stroke:var(--line)}.area{fill:var(--useful);opacity:.18}
.line{fill:none;stroke:var(--useful);stroke-width:2}.dot{fill:transparent}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;list-style:none;padding:0;margin:8px 0;
font-size:13px;color:var(--dim)}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
""" + "".join(f".legend i.{group}{{background:var(--{group})}}" for group, _ in plots.LEGEND) + """
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{text-align:left;color:var(--dim);font-weight:600}
th,td{padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th.n,td.n{text-align:right;white-space:nowrap}.scroll{overflow-x:auto}
code,pre{font:12.5px ui-monospace,monospace;background:var(--card)}
pre{border:1px solid var(--line);border-radius:6px;padding:10px;overflow-x:auto}
.verdict{font-size:17px;margin:14px 0 0}
@media print{body{max-width:none}}
"""  # fmt: skip


def page(found: Account, saved: Saved | None = None) -> str:
    """The whole file."""
    sentences = list(report.sentences(found, saved))
    dates = f"{report.moment(found.began_at)} to {report.moment(found.ended_at)}"
    body = [
        f"<h1>{escape(report.title(found))}</h1>",
        f'<p class="dim">{escape(dates)}</p>',
        f'<p class="verdict">{escape(sentences[0])}</p>',
        _tiles(found, saved),
        _section(
            "The run",
            plots.legend(found) + plots.timeline(found),
            "Triangles show where incidents were noticed.",
        ),
        _section(
            "Each pause",
            plots.waterfall(found),
            "How long training stood still, from the last step before it to the next one.",
        ),
        _section("Goodput over time", plots.over_time(found), sentences[1]),
        _section("Where the time went", plots.classes(found), _sum(found)),
        _section("Incidents", _incidents(found), _listed(found)),
        _section("Check it yourself", _check(found), ""),
    ]
    rest = "".join(f"<p>{escape(each)}</p>" for each in sentences[2:])
    notes = "".join(f'<p class="dim">Note: {escape(note)}.</p>' for note in found.notes)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Keepstep: {escape(found.job)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(body[:4])}\n{rest}{notes}\n{chr(10).join(body[4:])}\n"
        "</main></body></html>"
    )


def _section(name: str, drawing: str, words: str) -> str:
    told = f'<p class="dim">{escape(words)}</p>' if words else ""
    return f"<section><h2>{escape(name)}</h2>{told}{drawing}</section>"


def _tiles(found: Account, saved: Saved | None) -> str:
    kept = found.guarantee
    good = kept.rate >= found.terms.promised
    rate = f"{kept.rate:.1%}" if kept.counted else "none"
    lost = sum(each.rpo_steps for each in found.incidents)
    tiles = [
        _tile(rate, f"of {kept.counted} failures resolved live", "good" if good else "wrong"),
        _tile(f"{found.goodput:.1%}", "goodput: time that became new steps", ""),
        _tile(report.duration(found.rto.p50), "median pause of a failure", ""),
        _tile(f"{lost}", "committed steps made twice", "wrong" if lost else "good"),
    ]
    if saved is not None and saved.faults:
        text = f"kept against restart: {saved.device_hours:,.1f} device-hours"
        tiles.append(_tile(f"${saved.money:,.0f}", text, ""))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _tile(number: str, words: str, kind: str) -> str:
    return f'<div class="tile {kind}"><b>{escape(number)}</b><span>{escape(words)}</span></div>'


def _sum(found: Account) -> str:
    return (
        f"Every rank-second is in one class; together {found.total / 1e9:,.1f} rank-seconds of "
        f"{found.world} ranks and their spares."
    )


def _incidents(found: Account) -> str:
    if not found.incidents:
        return "<p>None.</p>"
    rows = [
        [report.moment(each.opened_at)[11:19], each.incident, each.what, _standing(each)]
        for each in found.incidents
    ]
    numbers = [[report.duration(each.rto_seconds), f"{each.rpo_steps}"] for each in found.incidents]
    heads = ["time (UTC)", "incident", "what", "counts as", "pause", "steps lost"]
    return _table(heads, rows, numbers)


def _standing(each: IncidentAccount) -> str:
    return f"{each.standing}: {each.why}"


def _table(
    heads: Iterable[str], texts: Sequence[Sequence[str]], numbers: Sequence[Sequence[str]]
) -> str:
    titles = list(heads)
    words = len(texts[0]) if texts else len(titles)
    top = "".join(
        f"<th{' class=n' if at >= words else ''}>{escape(head)}</th>"
        for at, head in enumerate(titles)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td>{escape(text)}</td>" for text in row)
        + "".join(f'<td class="n">{escape(number)}</td>' for number in last)
        + "</tr>"
        for row, last in zip(texts, numbers, strict=True)
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _listed(found: Account) -> str:
    kept = found.guarantee
    apart = [each for each in kept.incidents if each.standing in ("planned", "excluded")]
    declared = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in kept.declared.items())
    return (
        f"{kept.counted} count; {len(apart)} planned or excluded are listed and do not. "
        f"Declared pauses: {declared or 'none'}."
    )


def _check(found: Account) -> str:
    return (
        "<p>With the exported chain, your own step log and the key that you were given. "
        "<code>verify.py</code> is one file and needs only Python.</p>"
        f"<pre>keepstep admin export {escape(found.job)} --out export.jsonl\n"
        "python verify.py export.jsonl steps.jsonl --key KEY</pre>"
    )
