"""Numbers for Prometheus: bounded, well named, each incident counted once."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keepstep import exposition, logs
from keepstep.agent import metrics as agent_metrics
from keepstep.agent.run import AgentConfig
from keepstep.errors import ConfigError
from keepstep.exposition import Family, Sample, Spread
from keepstep.model import Endpoint, JobId, JobState, Mode, NodeId, Phase, Policy, Severity
from keepstep.orchestrator import board, metrics, state, view
from keepstep.orchestrator.board import Account
from keepstep.orchestrator.metrics import Facts, Tally
from keepstep.page import Mark, Progress
from tests import synthetic

ROOT = Path(__file__).resolve().parents[2]
SMALL = synthetic.Sizes(nodes=40, largest=64, jobs=3, ranks=16, closed=5)
LINE = re.compile(r'([a-z][a-z0-9_]*)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (\S+)')


def told(made: state.Cluster, tally: Tally | None = None, **more: Any) -> list[Family]:
    if tally is None:
        tally = Tally()
        tally.hear(made.closed)
    facts = Facts(synthetic.NOW, True, 10, synthetic.heartbeats(made).values(), 7, **more)
    return metrics.families(made, tally, facts)


def values(families: list[Family]) -> dict[str, float]:
    """As a scraper reads them: every line has to be well-formed."""
    found = {}
    for line in exposition.text(families).splitlines():
        if not line.startswith("# "):
            matched = LINE.fullmatch(line)
            assert matched, line
            found[line.rpartition(" ")[0]] = float(matched[3])
    return found


# --- bounds ---------------------------------------------------------------------------------------


def test_the_largest_cluster_with_more_jobs_than_are_shown_stays_within_5000_series():
    made = synthetic.cluster(synthetic.Sizes(jobs=230))
    for job in made.jobs.values():
        # The worst case: every series that a job can have.
        job.state = JobState.MIGRATING
        job.migration = state.Migration(
            *(synthetic.MigrationId("m"), "planned", "move", Phase.WARM, 0.0, 0.0)
        )
    accounts = dict.fromkeys(made.jobs, Account(0.9, 0.9, 0.9, 10))
    lines = dict.fromkeys(("info", "warning", "error"), 1)
    families = [*told(made, accounts=accounts, lines_told=lines), *exposition.of_process()]
    assert exposition.series(families) <= metrics.SERIES_MAX
    found = values(families)
    assert found["keepstep_jobs_not_shown"] == 30
    assert sum("keepstep_job_ranks{" in name for name in found) == metrics.JOBS_MAX
    assert 'keepstep_job_ranks{job_name="job-0"}' in found, "the largest job is always shown"


def test_no_series_of_the_orchestrator_names_a_rank_a_device_or_a_node():
    names = {
        label
        for family in told(synthetic.cluster(SMALL))
        for sample in family.samples
        for label, _ in sample.labels
    }
    assert names <= {"version", "level", "event", "state", "use", "severity"} | {
        *("outcome", "le", "phase", "job_name", "kind")
    }


def agent_facts(workers: int = 64) -> agent_metrics.Facts:
    config = AgentConfig(NodeId("n1"), 64, (Endpoint("o", 1),), "127.0.0.1", Path("room"))
    reading = Progress(1, 1, 10, Mark.FORWARD, 3, 0, 9, 250_000_000, "eval")
    crowd = tuple(
        SimpleNamespace(
            is_alive=True,
            is_standby=n % 4 == 0,
            record=SimpleNamespace(slot=n, ready=n % 8 == 0),
            page=SimpleNamespace(read=lambda: reading) if n % 2 else None,
        )
        for n in range(workers)
    )
    return agent_metrics.Facts(config, True, 3, crowd, Severity.LEAVE)  # type: ignore[arg-type]


def test_an_agent_has_at_most_50_series_whatever_it_runs():
    families = [*agent_metrics.families(agent_facts()), *exposition.of_process()]
    assert exposition.series(families) + 3 <= agent_metrics.SERIES_MAX  # three levels of lines
    found = values(families)
    assert found['keepstep_agent_info{node="n1"}'] == 1
    assert found['keepstep_agent_workers{state="training"}'] == 32
    assert found['keepstep_agent_workers{state="standby ready"}'] == 8
    assert found["keepstep_agent_step_seconds"] == 0.25
    assert found["keepstep_agent_health_severity"] == 2


# --- what they say --------------------------------------------------------------------------------


def test_nodes_devices_jobs_and_phases_are_counted_as_they_are():
    made = synthetic.cluster(SMALL)
    made.nodes[NodeId("n39")].drained = "new kernel"
    state.put_taint(made, "n38/1", state.Taint("hot", 0.0, 2e9))
    found = values(told(made))
    assert found['keepstep_nodes{state="lost"}'] == 1
    assert found['keepstep_nodes{state="empty"}'] == 1
    assert found['keepstep_slots{use="unusable"}'] == 8 + 1
    assert found['keepstep_slots{use="standby"}'] == found["keepstep_standbys_ready"] == 3
    assert found['keepstep_jobs{state="running"}'] == 2
    assert found['keepstep_job_state{job_name="job-0",state="migrating"}'] == 1
    assert found['keepstep_job_phase_seconds{job_name="job-0",phase="transfer"}'] == pytest.approx(
        3.1
    )
    assert found['keepstep_job_committed_step{job_name="job-1"}'] == 5000
    assert found['keepstep_job_step_seconds{job_name="job-1"}'] == 1.25
    assert found['keepstep_tainted_places{severity="avoid"}'] == 1
    assert not any("goodput" in name or "guarantee" in name for name in found), "no made-up account"


def test_a_job_that_is_only_observed_or_alone_with_its_state_is_not_protected():
    made = synthetic.cluster(SMALL)
    watched, alone = made.jobs[JobId("job-1")], made.jobs[JobId("job-2")]
    watched.spec = replace(watched.spec, policy=Policy(mode=Mode.OBSERVE))
    found = values(told(made))
    assert found['keepstep_job_protected{job_name="job-1"}'] == 0
    assert metrics.protected(alone, 0)
    assert not metrics.protected(alone, 1)


def test_the_ledgers_account_is_shown_where_there_is_one():
    accounts = {JobId("job-1"): Account(0.97, 0.95, 0.9, 20)}
    found = values(told(synthetic.cluster(SMALL), accounts=accounts))
    assert found['keepstep_job_goodput_ratio{job_name="job-1"}'] == 0.97
    assert found['keepstep_guarantee_live_ratio{job_name="job-1"}'] == 0.95
    assert 'keepstep_job_goodput_ratio{job_name="job-2"}' not in found


def test_each_incident_is_counted_once_however_often_somebody_looks():
    made = synthetic.cluster(SMALL)
    tally = Tally()
    for _ in range(3):
        tally.hear(made.closed)
    assert sum(tally.outcomes.values()) == 5
    # The brain forgets its oldest as new ones come.
    fresh = [
        replace(made.closed[-1], incident=synthetic.IncidentId(f"new-{n}"), outcome="fallback")
        for n in range(2)
    ]
    tally.hear((*made.closed[2:], *fresh))
    assert tally.outcomes["fallback"] == 2
    assert sum(tally.pauses.counts) == 5, "a fallback did not end with a pause alone"
    found = values(told(made, tally))
    assert found['keepstep_incidents_total{outcome="fallback"}'] == 2
    assert found['keepstep_incident_pause_seconds_bucket{le="+Inf"}'] == 5
    assert found["keepstep_incident_pause_seconds_count"] == 5


def test_no_incident_is_counted_again_when_the_newest_is_gone_with_its_jobs_name():
    made = synthetic.cluster(SMALL)
    ids = ["i2", "i7", "i4", "i9"]
    began = [replace(made.closed[-1], incident=synthetic.IncidentId(name)) for name in ids]
    tally = Tally()
    tally.hear(began[:2])
    # One that began before another may end after it: its number says nothing.
    tally.hear(began[:3])
    assert sum(tally.outcomes.values()) == 3
    tally.hear(began[:2])
    assert sum(tally.outcomes.values()) == 3, "the newest is let go"
    tally.hear(began[3:])
    assert sum(tally.outcomes.values()) == 4
    later = Tally.after(began[:3])
    later.hear((*began[:2], began[3]))
    assert sum(later.outcomes.values()) == 1


def test_what_was_over_when_a_term_began_is_nobodys_news():
    """A process that leads again, or takes over, would show hundreds of old ones as an increase."""
    made = synthetic.cluster(SMALL)
    assert len(made.closed) == 5
    tally = Tally.after(made.closed)
    tally.hear(made.closed)
    assert sum(tally.outcomes.values()) == 0
    fresh = replace(made.closed[-1], incident=synthetic.IncidentId("new"))
    tally.hear((*made.closed[1:], fresh))
    assert sum(tally.outcomes.values()) == sum(tally.pauses.counts) == 1
    nothing = Tally.after(())
    nothing.hear(made.closed)
    assert sum(nothing.outcomes.values()) == 5


def test_the_pause_of_a_fault_that_was_told_late_is_the_one_that_the_page_shows():
    made = synthetic.cluster(SMALL)
    late = replace(made.closed[-1], late_seconds=7.0)
    late.seconds["warm"] = 2.0
    tally = Tally()
    tally.hear([late])
    story = board.story(late, None, synthetic.NOW)
    assert tally.pauses.sum == view.incident_view(late)["pause_seconds"] == story.pause_seconds
    assert story.lasted_seconds == pytest.approx(late.closed_at - late.opened_at + 7.0)
    assert tally.pauses.sum == pytest.approx(story.lasted_seconds - 2.0)


# --- the format -----------------------------------------------------------------------------------


def test_labels_are_escaped_and_cut():
    odd = 'a"b\\c\nd' + "x" * 300
    family = Family("keepstep_odd", "gauge", "An odd one.", (Sample((("name", odd),), 1.5),))
    (line,) = [x for x in exposition.text([family]).splitlines() if not x.startswith("#")]
    assert line.startswith('keepstep_odd{name="a\\"b\\\\c\\nd')
    assert LINE.fullmatch(line)
    assert len(line) < 200


@pytest.mark.parametrize(
    ("name", "kind"),
    [("keepstep_steps", "counter"), ("keepstep_x_total", "gauge"), ("keepstep_wait_ms", "gauge")],
)
def test_a_name_that_breaks_the_conventions_is_refused(name: str, kind: str):
    with pytest.raises(AssertionError):
        Family(name, kind, "About.", ())


def test_a_histogram_is_cumulative_and_takes_no_more_memory_with_more_values():
    spread = Spread((1.0, 5.0))
    for value in (0.5, 1.0, 3.0, 9.0):
        spread.add(value)
    found = values([exposition.histogram("keepstep_h_seconds", "H.", spread)])
    assert list(found.values()) == [2, 3, 4, 13.5, 4]
    assert len(spread.counts) == 3


def test_a_process_tells_of_itself_as_client_libraries_do():
    found = values(exposition.of_process())
    assert found["process_resident_memory_bytes"] > 1e6
    assert found["process_start_time_seconds"] > 1.5e9
    assert found["process_open_fds"] >= 3


# --- the agent's server ---------------------------------------------------------------------------


def test_an_agent_answers_one_question_and_no_other():
    good = agent_metrics.reply(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", agent_facts)
    head, _, body = good.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert f"Content-Length: {len(body)}".encode() in head
    assert b"keepstep_agent_connected 1\n" in body
    for bad in (b"POST /metrics HTTP/1.1", b"GET / HTTP/1.1", b"nonsense", b""):
        assert not agent_metrics.reply(bad + b"\r\n\r\n", agent_facts).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("listen", ["", "host", "host:", "h:70000", "h:-1"])
def test_a_place_to_listen_that_is_none_is_refused(listen: str):
    with pytest.raises(ConfigError, match="metrics_listen"):
        agent_metrics.host_and_port(listen)


def test_a_port_alone_is_of_this_machine_only():
    assert agent_metrics.host_and_port("9309") == ("127.0.0.1", 9309)
    assert agent_metrics.host_and_port("[::1]:9309") == ("::1", 9309)


def test_a_taken_port_is_told_as_the_users_mistake():
    async def twice() -> None:
        async def hello(_: object, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_server(hello, "127.0.0.1", 0) as taken:
            port = taken.sockets[0].getsockname()[1]
            await agent_metrics.serve(f"127.0.0.1:{port}", agent_facts)

    with pytest.raises(ConfigError, match="cannot listen on"):
        asyncio.run(asyncio.wait_for(twice(), 10))


# --- dashboard, rules and runbook -----------------------------------------------------------------


def known_names() -> set[str]:
    accounts = {JobId("job-1"): Account(0.97, 0.95, 0.9, 20)}
    made = synthetic.cluster(SMALL)
    families = [*told(made, accounts=accounts), *agent_metrics.families(agent_facts())]
    families += exposition.of_process()
    suffixes = ("", "_bucket", "_sum", "_count")
    return {family.name + suffix for family in families for suffix in suffixes}


@pytest.mark.parametrize(
    "path", ["deploy/grafana/keepstep.json", "deploy/prometheus/keepstep.rules.yml"]
)
def test_dashboard_and_rules_ask_only_for_numbers_that_are_told(path: str):
    text = (ROOT / path).read_text(encoding="utf-8")
    asked = set(re.findall(r"\b(?:keepstep|process)_[a-z_]+", text)) - {"keepstep_"}
    assert len(asked) > 5
    assert asked - known_names() == set()


def test_every_alert_leads_to_its_section_of_the_runbook():
    rules = (ROOT / "deploy/prometheus/keepstep.rules.yml").read_text(encoding="utf-8")
    alerts = re.findall(r"- alert: (\w+)", rules)
    anchors = re.findall(r"runbook_url: docs/operating\.md#(\w+)", rules)
    wanted = {"SparesExhausted", "JobUnprotected", "MigrationStuck", "ControlPlaneDown"}
    assert set(alerts) == wanted | {"GuaranteeAtRisk"}
    assert anchors == [alert.lower() for alert in alerts]
    runbook = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    titles = re.findall(r"(?m)^### (\w+)$", runbook)
    assert set(alerts) <= set(titles)


def test_prometheus_and_alertmanager_are_given_tokens_that_can_do_little():
    scraping = (ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8")
    assert re.findall(r"credentials_file: (\S+)", scraping) == ["viewer-token"]
    assert "--role viewer" in scraping
    assert "scheme: https" in scraping
    guide = (ROOT / "docs/operating.md").read_text(encoding="utf-8")
    assert re.findall(r"credentials_file: (\S+)", guide) == ["webhook-token"]
    assert "--role viewer" in guide
    assert "--role webhook" in guide


def test_the_dashboard_is_whole_and_nothing_lies_over_anything_else():
    board = json.loads((ROOT / "deploy/grafana/keepstep.json").read_text(encoding="utf-8"))
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells


# --- logs -----------------------------------------------------------------------------------------


def test_the_log_counts_its_lines():
    before = logs.lines_told["warning"]
    logs.tell("keepstep.test", 30, "x.y", "x.y a=1", {"a": 1})
    assert logs.lines_told["warning"] == before + 1
    assert logs.events_told["x.y"] >= 1
