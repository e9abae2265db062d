"""What operators read, made from a picture without any orchestrator."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.cli import view
from keepstep.cli.fit import cut, fit, width
from keepstep.cli.logs import tail
from keepstep.cli.show import only_job
from keepstep.errors import ConfigError


def seat(rank: int, node: str, slot: int, phase: str = "running", incarnation: int = 0) -> Any:
    return {
        "rank": rank,
        "node": node,
        "slot": slot,
        "phase": phase,
        "incarnation": incarnation,
    }


def job(**more: Any) -> dict[str, Any]:
    return {
        "id": "train",
        "state": "running",
        "over": False,
        "since": 0.0,
        "mode": "act",
        "generation": 3,
        "step": 10,
        "incidents": 1,
        "fallbacks": 0,
        "published": {"step": -1, "path": ""},
        "detail": "",
        "migration": None,
        "leaving": [],
        "uncovered": [],
        "unsure": None,
        "remedies": [],
        "nodes": 2,
        "ranks_per_node": 1,
        "loan": None,
        "spares": {"wanted": 1, "ready": 1, "standbys": [{"node": "n2", "slot": 0, "ready": True}]},
        "seats": [seat(0, "n0", 0), seat(1, "n1", 0, incarnation=2)],
        **more,
    }


def node(name: str, **more: Any) -> dict[str, Any]:
    use = {"slot": 0, "job": "train", "rank": 0, "standby": False, "fenced": False, "taint": None}
    facts = {"id": name, "alive": True, "address": "10.0.0.1", "slots": 1, "free": 0, "uses": [use]}
    facts |= {
        "drained": None,
        "taint": None,
        "empty": False,
        "faults": 0,
        "labels": {},
        "left": False,
    }
    return {**facts, **more}


def picture(**more: Any) -> dict[str, Any]:
    nodes = {name: node(name) for name in ("n0", "n1", "n2")}
    pace = {"step": 41, "step_seconds": 0.2, "busy": "eval"}
    return {
        "term": 2,
        "now": 100.0,
        "frozen": None,
        "control_plane": {"down_seconds": 0.0, "outages": [], "gaps": []},
        "jobs": {"train": job()},
        "nodes": nodes,
        "incidents": [],
        "connected": ["n0", "n1", "n2"],
        "paces": dict.fromkeys(more.get("jobs", ["train"]), pace),
        **more,
    }


def test_status_shows_the_newest_step_that_heartbeats_know():
    text = "\n".join(view.status_lines(picture()))
    assert "RUNNING" in text
    assert "step 41 (200 ms/step) busy: eval" in text
    assert "nodes 3/3 alive" in text


def test_a_drained_node_and_who_cannot_leave_it_are_told():
    waits = {"rank": 1, "why": "patches", "to": None, "waits": "no room yet: add a node"}
    nodes = {"n0": node("n0"), "n1": node("n1", drained="patches")}
    seen = picture(jobs={"train": job(leaving=[waits])}, nodes=nodes)
    text = "\n".join(view.status_lines(seen))
    assert "rank 1 shall move; no room yet: add a node" in text
    assert "drained: n1 (patches)" in text
    assert "draining" in "\n".join(view.node_lines(seen))
    nodes["n1"]["empty"] = True
    assert "empty" in "\n".join(view.node_lines(seen))


def test_a_frozen_cluster_and_a_job_that_is_only_observed_are_told():
    frozen = {"why": "a switch is replaced", "since": 0.0}
    seen = picture(frozen=frozen, jobs={"train": job(mode="observe")})
    lines = view.status_lines(seen)
    assert lines[1].startswith("FROZEN since ")
    assert lines[1].endswith(": a switch is replaced")
    assert "mode observe" in "\n".join(lines)
    assert "FROZEN" not in "\n".join(view.status_lines(picture()))


def test_a_planned_move_shows_its_own_phases():
    moving = {"kind": "planned", "phase": "agree", "began_at": 98.0}
    line = view.migration_line(moving, 100.0)
    assert line.startswith("planned migration: warm>[agree]>quiesce>reform")


def test_taints_are_listed_with_what_is_left_of_their_time():
    taint = {"place": "n3/1", "severity": "leave", "source": "dcgm", "reason": "XID 79"}
    seen = picture(taints=[{**taint, "at": 0.0, "until": 100.0 + 7200.0}])
    (line,) = view.taint_lines(seen, view.ansi)[1:]
    assert "n3/1" in line
    assert "2 h" in line
    assert line.endswith("dcgm    XID 79")
    assert view.taint_lines(picture(taints=[])) == ["no taints: every place may be used"]


def test_seats_are_shown_on_their_nodes_with_moved_ranks_marked():
    lines = view.seat_lines(job(), picture())
    assert [line.split() for line in lines] == [
        ["n0", "0", "ok"],
        ["n1", "1'2", "ok"],
        ["n2", "+", "spare"],
    ]


def test_a_planned_move_shows_where_a_rank_goes_and_that_its_old_worker_waits():
    moving = {"kind": "planned", "phase": "warm", "began_at": 98.0}
    coming = {"rank": 1, "node": "n2", "slot": 0, "incarnation": 3}
    told = job(migration={**moving, "coming": [coming], "leavers": []})
    assert view.seat_lines(told, picture())[2].split() == ["n2", "1'3", "coming"]
    old = {"rank": 1, "node": "n1", "slot": 0, "incarnation": 2}
    seats = [seat(0, "n0", 0), seat(1, "n2", 0, incarnation=3)]
    told = job(migration={**moving, "coming": [], "leavers": [old]}, seats=seats)
    assert view.seat_lines(told, picture())[1].split() == ["n1", "1'2", "leaving"]


def test_a_lost_node_and_an_agent_that_is_away_are_told_apart():
    nodes = {"n0": node("n0", alive=False), "n1": node("n1"), "n2": node("n2")}
    lines = view.seat_lines(job(), picture(nodes=nodes, connected=["n2"]))
    assert lines[0].endswith("lost")
    assert lines[1].endswith("agent away")
    assert "lost: n0" in view.status_lines(picture(nodes=nodes))


def test_a_migration_shows_where_it_is_and_for_how_long():
    migration = {"kind": "unplanned", "phase": "reform", "began_at": 99.5}
    line = view.migration_line(migration, 100.0)
    assert line == ("unplanned migration: allocate>quiesce>[reform]>transfer>verify>resume  500 ms")
    held = view.migration_line({**migration, "phase": "hold"}, 130.0)
    assert held == "HOLD for 30.5 s"


def test_a_large_cluster_is_cut_to_what_is_wrong():
    names = [f"n{i}" for i in range(100)]
    seats = [seat(i, name, 0, "empty" if i == 77 else "running") for i, name in enumerate(names)]
    big = job(seats=seats, spares={"wanted": 0, "ready": 0, "standbys": []})
    lines = view.seat_lines(
        big, picture(nodes={name: node(name) for name in names}, connected=names)
    )
    assert len(lines) == view.NODES_SHOWN_MAX + 1
    assert lines[0].split() == ["n77", "77", "empty"]
    assert lines[-1] == "… and 76 more nodes, all well"


def test_an_incident_is_a_story_with_reasons_and_the_pause_by_part():
    cause = {"sign": "exit", "rank": 2, "node": "n1", "step": 7, "exit_code": -9, "detail": "a\nb"}
    incident = {
        "id": "i1",
        "job": "train",
        "opened_at": 10.0,
        "closed_at": 10.4,
        "outcome": "resumed",
        "generation": 4,
        "boundary": 6,
        "causes": [cause],
        "causes_count": 3,
        "story": [[10.0, "allocate", "rank 2 died"], [10.1, "quiesce", "all unwound"]],
        "seconds": {"resume": 0.1, "quiesce": 0.3},
        "pause_seconds": 0.4,
    }
    lines = view.incident_lines(incident)
    text = "\n".join(lines)
    assert lines[0] == "i1  job train  resumed  after 400 ms"
    assert "exit: rank 2 on n1, step 7, exit code -9" in text
    assert "and 2 more" in text
    assert "+0.100s  quiesce    all unwound" in text
    pause = lines[lines.index("the pause by part") + 1 :]
    assert [line.split()[0] for line in pause] == ["quiesce", "resume", "together"]
    assert pause[0].count("#") == 30


def test_a_parked_job_says_to_whom_it_lends_and_the_account_has_it_all():
    loan = {"lender": "small", "borrower": "big", "devices": 4, "needed": 1, "boundary": 70}
    now = {**loan, "asked_at": 10.0, "began_at": 40.0, "ended_at": None}
    over = {**loan, "asked_at": 1.0, "began_at": 2.0, "ended_at": 9.0}
    soon = {**loan, "asked_at": 1.0, "began_at": None, "ended_at": None, "boundary": -1}
    parked = job(id="small", state="parked", loan=now, seats=[])
    text = "\n".join(view.status_lines(picture(jobs={"small": parked})))
    assert "small  PARKED" in text
    assert "parked at boundary 70 for 60 s, lends 4 devices to big" in text
    lines = view.loan_lines(picture(loans=[over, now, soon]))
    assert lines[1].split()[:5] == ["small", "big", "4", "1", "70"]
    assert lines[1].endswith("7 s")
    assert lines[2].endswith("60 s, and still parked")
    assert lines[3].endswith("is being parked")
    assert view.loan_lines(picture(loans=[])) == ["no loans: no job was parked for another one"]


def test_a_nodes_faults_and_labels_are_shown():
    nodes = {"n0": node("n0", faults=3, labels={"rack": "r1", "nvlink_domain": "d2"})}
    _, line = view.node_lines(picture(nodes=nodes), columns=120)
    assert line.split()[5:] == ["3", "0:train/rank", "0", "[nvlink_domain=d2,rack=r1]"]


def test_nodes_say_who_uses_them():
    standby = {"slot": 0, "job": "t", "rank": None, "standby": True, "fenced": False, "taint": None}
    tainted = {**standby, "job": None, "standby": False, "taint": "flaky link"}
    nodes = {"n0": node("n0"), "n1": node("n1", uses=[standby]), "n2": node("n2", uses=[tainted])}
    text = "\n".join(view.node_lines(picture(nodes=nodes)))
    assert "0:train/rank 0" in text
    assert "0:t/standby" in text
    assert "tainted(flaky link)" in text


def test_a_frame_fits_its_screen_and_ends_with_the_newest_reason():
    records = [
        {"at": 1.0, "why": f"reason {n}", "phases": {"train": "quiesce"}, "node": None}
        for n in range(50)
    ]
    lines = view.frame_lines(picture(), records, 20)
    assert len(lines) <= 20
    assert lines[-1].endswith("train[quiesce]  reason 49")


def test_colour_takes_no_room_on_the_screen():
    assert cut(view.ansi("abcdef", "good"), 3) == "\x1b[32mab\x1b[0m…\x1b[0m"
    assert cut("abc", 3) == "abc"


def test_without_a_name_the_only_running_job_is_meant():
    assert only_job(picture()) == "train"
    over = {"old": job(id="old", over=True, since=1.0), "new": job(id="new", over=True, since=2.0)}
    assert only_job(picture(jobs=over), over_too=True) == "new"
    with pytest.raises(ConfigError, match="old, new"):
        only_job(picture(jobs=over))


def test_a_log_is_followed_to_its_last_line(tmp_path: Any):
    path = tmp_path / "rank_0.log"
    path.write_text("one\ntwo\nthr", encoding="utf-8")
    assert list(tail(path, 0, lambda: True)) == ["one\n", "two\n", "thr\n"]
    assert list(tail(path, 1, lambda: True)) == ["thr\n"]
    assert list(tail(tmp_path / "none", 0, lambda: True)) == []


LONG = "a sentence that goes on and on, as reasons do when several things came together, " * 3


def crowded() -> dict[str, Any]:
    """A picture in which everything is long: names, reasons, and the number of slots."""
    names = [f"gpu-node-{i:03}.rack-{i}.example" for i in range(3)]
    use = {"job": "pretraining-run-7", "standby": False, "fenced": False, "taint": None}
    uses = [{**use, "slot": slot, "rank": 100 + slot} for slot in range(8)]
    labels = {"nvlink_domain": "domain-12", "rack": "row-3-rack-7", "switch": "leaf-12"}
    facts = {"slots": 8, "uses": uses, "labels": labels, "drained": LONG, "taint": LONG}
    nodes = {name: node(name, address="10.120.130.140", **facts) for name in names}
    nodes[names[2]] |= {"alive": False, "left": True}
    seats = [seat(100 + slot, names[0], slot, "transfer: reported", 3) for slot in range(8)]
    wish = {"rank": 1, "why": LONG, "to": None, "waits": LONG}
    moving = {"kind": "planned", "phase": "transfer", "began_at": 1.0}
    more: dict[str, Any] = {"seats": seats, "leaving": [wish], "remedies": [LONG, "short"]}
    told = job(id="pretraining-run-7", mode="observe", fallbacks=3, migration=moving, **more)
    taint = {"place": names[0], "severity": "imminent", "source": "alertmanager/GpuXidError"}
    loan = {"lender": "pretraining-run-7", "borrower": "posttraining-run-12", "devices": 4}
    loan |= {"needed": 1, "boundary": 70_000, "asked_at": 1.0, "began_at": 2.0, "ended_at": None}
    return picture(
        nodes=nodes,
        connected=names[:2],
        frozen={"why": LONG, "since": 0.0},
        jobs={"pretraining-run-7": told, "w": job(id="w", state="waiting", seats=[])},
        taints=[{**taint, "reason": LONG, "at": 0.0, "until": 1e6}],
        loans=[loan],
    )


@pytest.mark.parametrize("paint", [view.plain, view.ansi])
@pytest.mark.parametrize("columns", [80, 120])
def test_everything_fits_the_screen_and_no_word_is_lost(columns: int, paint: view.Painter):
    seen = crowded()
    record = {"at": 1.0, "why": LONG, "phases": {"train": "quiesce"}, "node": None}
    views = [
        view.status_lines(seen, paint, columns),
        view.node_lines(seen, paint, columns),
        view.taint_lines(seen, paint, columns),
        view.loan_lines(seen, paint, columns),
        view.frame_lines(seen, [record] * 5, 60, paint, columns),
    ]
    for lines in views:
        assert [line for line in lines if width(line) > columns] == []
    taints = " ".join(" ".join(views[2]).split())
    assert " ".join(LONG.split()) in taints
    status = " ".join(" ".join(views[0]).split())
    assert "what would help:" in status
    assert "waits for 2 nodes with 1 free slots each" in status
    assert "left in good order: gpu-node-002" in status


def test_a_long_line_goes_on_below_its_text_and_a_long_word_is_split():
    assert fit(["  +1 s  \vone two three"], 40) == ["  +1 s  one two three"]
    assert fit(["  +1 s  \v" + "word " * 12], 40)[1].startswith("        word")
    assert fit(["x" * 50], 40) == ["x" * 40, "    " + "x" * 10]


def test_an_explanation_fits_the_screen():
    incident = {
        "id": "i1",
        "job": "train",
        "opened_at": 10.0,
        "closed_at": 10.4,
        "outcome": "resumed",
        "generation": 4,
        "boundary": 6,
        "causes": [],
        "causes_count": 0,
        "pause_seconds": 0.4,
        "story": [[10.0, "allocate", LONG]],
        "seconds": {"resume": 0.1},
    }
    lines = view.incident_lines(incident)
    assert max(map(len, lines)) <= 80
    assert " ".join(LONG.split()) in " ".join(" ".join(lines).split())
