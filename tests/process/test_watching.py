"""A real cluster as people watch it: the live page in a real Chromium, a real Prometheus, the logs.

One job of four ranks loses one. Everything that is asserted here was seen during that one story,
told by the fixture `seen`. The largest fleet is made up, and served by a real API handler.

`KEEPSTEP_SHOTS=docs` writes the screenshots of the documents on the way: look at them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from keepstep import exposition
from keepstep.chaos.sight import Sight
from keepstep.cli import demo
from keepstep.cli.cluster import ClusterPlan, LocalCluster, NodePlan
from keepstep.clock import RealClock
from keepstep.config import OrchestratorConfig
from keepstep.model import NodeId, Term
from keepstep.orchestrator import state
from keepstep.orchestrator.access import Gate
from keepstep.orchestrator.api import Api
from keepstep.orchestrator.follow import Follower
from keepstep.orchestrator.http import HttpServer, Reply, Request
from keepstep.orchestrator.journal import Look, SharedJournal
from keepstep.orchestrator.journal_sqlite import SqliteJournal
from keepstep.orchestrator.run import Orchestrator
from keepstep.orchestrator.tokens import Tokens
from tests import synthetic
from tests.browser import Chromium, Page, chromium
from tests.unit.test_metrics import agent_facts, agent_metrics, told

__all__ = ["chromium"]
# One story, told by a fixture that the first test waits for.
pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus"
TOKEN = "a-token-for-tests-only"
VICTIM = 2
SECONDS_MAX = 60.0
READY_MS_MAX = 1000.0

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool is installed (Debian: prometheus)"
)

# --- a real Prometheus ----------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Prometheus:
    """Debian's, with the files of deploy/prometheus, which name other hosts and a slower pace."""

    def __init__(self, directory: Path, orchestrator: str, token: str, agents: list[str]) -> None:
        directory.mkdir()
        config = (RULES / "prometheus.yml").read_text(encoding="utf-8")
        config = config.replace('"orchestrator:7070"', f'"{orchestrator}"')
        config = config.replace('"node-1:9309", "node-2:9309"', json.dumps(agents)[1:-1])
        config = config.replace("_interval: 15s", "_interval: 1s")
        (directory / "prometheus.yml").write_text(config, encoding="utf-8")
        (directory / "viewer-token").write_text(token, encoding="utf-8")
        shutil.copy(RULES / "keepstep.rules.yml", directory)
        self.port = free_port()
        self._log = (directory / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )

    def close(self) -> None:
        self._log.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)

    def get(self, path: str, **query: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.loads(reply.read())["data"]

    def value(self, query: str) -> float | None:
        found = self.get("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "Prometheus has ended"
            try:
                if holds():
                    return
            except OSError:
                pass  # It does not listen yet.
            time.sleep(0.1)
        raise TimeoutError(what)


# --- the story ------------------------------------------------------------------------------------

WATCH = """
window.marked = "this very page";
window.shown = [];
new MutationObserver(() => {
  const story = document.querySelector("#open .story");
  if (story) window.shown.push({
    text: story.innerText,
    now: [...story.querySelectorAll(".phases [aria-current=step] b")].map((b) => b.textContent),
    ranks: document.querySelector("#jobs .words").textContent,
  });
}).observe(document.querySelector("main"), {subtree: true, childList: true, characterData: true});
"""


def shoot(
    page: Page, name: str, size: tuple[int, int] = (1440, 900), scheme: str = "light"
) -> None:
    """A screenshot, if somebody asked for them."""
    if directory := os.environ.get("KEEPSTEP_SHOTS"):
        page.resize(*size)
        page.prefer(scheme)
        time.sleep(0.4)  # The page lays itself out anew a tenth of a second after a resize.
        page.shoot(Path(directory) / name)
        page.resize(1440, 900)
        page.prefer("light")


@dataclass
class Seen:
    """What was seen on the way."""

    asked_for_token: bool = False
    before: str = ""
    during: list[dict[str, Any]] = field(default_factory=list)
    after: str = ""
    said: str = ""
    marked: str = ""
    errors: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    token: str = ""
    numbers: dict[str, float | None] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def seen(chromium: Chromium, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("watched")
    as_json = dict.fromkeys(
        ("KEEPSTEP_ORCHESTRATOR_LOG_FORMAT", "KEEPSTEP_AGENT_LOG_FORMAT"), "json"
    )
    nodes = [
        NodePlan(name, slots, environment={"KEEPSTEP_AGENT_METRICS_LISTEN": "0"})
        for name, slots in (("n0", 2), ("n1", 2), ("n2", 1))
    ]
    found = Seen()
    with LocalCluster(directory, nodes, ClusterPlan(environment=as_json)) as cluster:
        sight = Sight(cluster, demo.JOB)
        page = first_look(found, cluster, chromium)
        cluster.wait_nodes()
        prometheus = scraping(cluster, directory)
        try:
            # No warm standby: the worker is started when it is needed, so the story takes a moment.
            cluster.client.submit(replace(demo._spec(directory), spares=0))
            cluster.wait_until(lambda picture: demo._running(picture, 0), SECONDS_MAX, "the job")
            lose_one(found, sight, page)
            if prometheus is not None:
                ask_prometheus(found, prometheus)
        finally:
            sight.close()
            if prometheus is not None:
                prometheus.close()
        found.errors, found.addresses = page.errors(), page.addresses()
        found.logs = {
            path.name: path.read_text(encoding="utf-8").splitlines()
            for path in directory.glob("*.log")
        }
    return found


def first_look(found: Seen, cluster: LocalCluster, chromium: Chromium) -> Page:
    """Nobody sees anything without the token."""
    page = chromium.page(f"{cluster.client.url}/")
    page.wait("document.getElementById('token').open", SECONDS_MAX)
    found.asked_for_token = page.run("document.body.dataset.ready") is None
    found.token = cluster.client.token
    page.run(f"document.getElementById('token-text').value = {json.dumps(found.token)}")
    page.run("document.querySelector('#token-form button').click()")
    page.wait("document.body.dataset.ready === 'yes'", SECONDS_MAX)
    page.run(WATCH)
    return page


def scraping(cluster: LocalCluster, directory: Path) -> Prometheus | None:
    if shutil.which("prometheus") is None:
        return None
    agents = []
    for name in cluster.nodes:
        lines = (directory / f"agent-{name}.log").read_text(encoding="utf-8").splitlines()
        events = [json.loads(line) for line in lines if line.startswith("{")]
        (told,) = [event for event in events if event["event"] == "metrics.listening"]
        agents.append(f"127.0.0.1:{told['port']}")
    host = urllib.parse.urlsplit(cluster.client.url).netloc
    return Prometheus(directory / "prometheus", host, cluster.client.token, agents)


def lose_one(found: Seen, sight: Sight, page: Page) -> None:
    running = "document.querySelector('#jobs .pill').textContent === 'running'"
    page.wait(f"{running} && /^step\\n\\d\\d/m.test(document.body.innerText)", SECONDS_MAX)
    found.before = page.text()
    os.kill(sight.pid_of(VICTIM), signal.SIGKILL)
    if os.environ.get("KEEPSTEP_SHOTS"):
        page.wait("document.querySelectorAll('#open .told li').length > 3", SECONDS_MAX)
        page.shoot(Path(os.environ["KEEPSTEP_SHOTS"]) / "page-incident.png")
    over = "document.querySelector('#closed .story .pill')?.textContent === 'resumed'"
    page.wait(f"{over} && {running} && !document.querySelector('#open .story')", SECONDS_MAX)
    found.during = page.run("window.shown")
    page.run("document.querySelector('#closed .story').open = true")
    found.after = page.text()
    found.said = page.run("document.getElementById('announce').textContent")
    found.marked = page.run("window.marked")
    shoot(page, "page.png")
    shoot(page, "page-dark.png", scheme="dark")
    shoot(page, "page-narrow.png", (420, 1400))


def ask_prometheus(found: Seen, prometheus: Prometheus) -> None:
    resumed = 'keepstep_incidents_total{outcome="resumed"}'
    training = 'sum(keepstep_agent_workers{state="training"})'
    prometheus.until(lambda: prometheus.value(resumed) == 1, "the incident in Prometheus")
    # Every target is scraped at a moment of its own: the agents' last may be of the pause.
    prometheus.until(lambda: prometheus.value(training) == 4, "the ranks at work in Prometheus")
    queries = (
        "keepstep_leading",
        resumed,
        "keepstep_incident_pause_seconds_count",
        'keepstep_job_ranks{job_name="demo"}',
        'keepstep_job_committed_step{job_name="demo"} > 0',
        'keepstep_nodes{state="ready"}',
        "sum(keepstep_agent_connected)",
        'keepstep_guarantee_live_ratio{job_name="demo"}',
        'keepstep_job_goodput_ratio{job_name="demo"} > 0.1',
        training,
        'count({__name__=~"keepstep_.*|process_.*", job="keepstep-orchestrator"})',
        'max(count by (instance) ({__name__=~"keepstep_.*|process_.*", job="keepstep-agent"}))',
        'absent(ALERTS{alertname="ControlPlaneDown", alertstate="firing"})',
    )

    def look() -> bool:
        """All in one look: a scrape that took too long leaves a hole, and the next one fills it."""
        found.numbers = {query: prometheus.value(query) for query in queries}
        active = prometheus.get("targets")["activeTargets"]
        found.targets = {target["scrapeUrl"]: target["health"] for target in active}
        return None not in found.numbers.values() and set(found.targets.values()) == {"up"}

    prometheus.until(look, "every number in Prometheus")
    groups = prometheus.get("rules")["groups"]
    found.numbers["rules"] = sum(len(group["rules"]) for group in groups)


# --- what was seen --------------------------------------------------------------------------------


@pytest.mark.browser
def test_nothing_is_shown_without_the_token_and_it_never_enters_an_address(seen: Seen):
    assert seen.asked_for_token
    assert seen.addresses
    assert not any(seen.token in address for address in seen.addresses)
    assert len({urllib.parse.urlsplit(a).netloc for a in seen.addresses if a != "about:blank"}) == 1


@pytest.mark.browser
def test_the_incident_appears_and_resolves_on_the_page_without_a_reload(seen: Seen):
    assert "Nothing was wrong so far." in seen.before
    assert seen.during, "the incident was never shown while it was open"
    assert f"exit: rank {VICTIM} on" in seen.during[-1]["text"]
    phases = {phase for moment in seen.during for phase in moment["now"]}
    assert phases & {"allocate", "quiesce", "reform", "transfer", "verify", "resume"}
    assert any("running" not in moment["ranks"] for moment in seen.during)
    assert "Nothing is wrong now. What was:" in seen.after
    assert "resumed" in seen.after
    assert "pause " in seen.after
    assert "Resolved live\n–\nno failure counts so far" in seen.before
    assert "Resolved live\n100%\nof 1 failure" in seen.after
    assert re.search(r"Goodput\n\d\d?\.\d\d%\nof all jobs, to date", seen.after)
    assert seen.marked == "this very page", "it was loaded anew"


@pytest.mark.browser
def test_a_screen_reader_is_told_how_it_ended(seen: Seen):
    assert " is over: resumed after " in seen.said


@pytest.mark.browser
def test_the_pages_own_policy_is_kept_and_nothing_goes_wrong_in_it(seen: Seen):
    # The first board was asked for without a token, and refused: that is how it knows.
    assert [error for error in seen.errors if "401" not in error] == []


@pytest.mark.browser
@needs_promtool
def test_prometheus_scrapes_orchestrator_and_agents_of_a_running_job(seen: Seen):
    assert len(seen.targets) == 4
    assert set(seen.targets.values()) == {"up"}
    numbers = seen.numbers
    assert numbers["keepstep_leading"] == 1
    assert numbers['keepstep_job_ranks{job_name="demo"}'] == 4
    assert (numbers['keepstep_job_committed_step{job_name="demo"} > 0'] or 0) > 0
    assert numbers["keepstep_incident_pause_seconds_count"] == 1
    assert numbers['keepstep_nodes{state="ready"}'] == 3
    assert numbers["sum(keepstep_agent_connected)"] == 3
    assert numbers['keepstep_guarantee_live_ratio{job_name="demo"}'] == 1
    assert 0.1 < (numbers['keepstep_job_goodput_ratio{job_name="demo"} > 0.1'] or 0) < 1
    assert numbers['sum(keepstep_agent_workers{state="training"})'] == 4
    assert numbers["rules"] == 7
    orchestrators, agents = [v or 0 for name, v in numbers.items() if "count" in name][1:]
    assert 50 < orchestrators <= 5000
    assert 10 < agents <= 50


@pytest.mark.browser
def test_every_line_of_the_logs_is_an_object(seen: Seen):
    assert {"orchestrator.log", "agent-n0.log"} <= seen.logs.keys()
    for name, lines in seen.logs.items():
        events = [json.loads(line) for line in lines]
        assert all({"time", "level", "event"} <= event.keys() for event in events), name
    decided = [json.loads(line) for line in seen.logs["orchestrator.log"]]
    assert any(event["event"] == "decided" and event.get("why") for event in decided)


# --- the rules, by promtool -----------------------------------------------------------------------


def promtool(*arguments: str, given: str = "", where: Path = ROOT) -> str:
    done = subprocess.run(
        ["promtool", *arguments],
        input=given,
        cwd=where,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@needs_promtool
def test_the_rules_are_sound_and_fire_when_they_should():
    assert "7 rules found" in promtool("check", "rules", str(RULES / "keepstep.rules.yml"))
    assert "SUCCESS" in promtool("test", "rules", str(RULES / "keepstep.rules.test.yml"))


@needs_promtool
def test_the_example_configuration_is_sound(tmp_path: Path):
    for path in RULES.glob("*.yml"):
        shutil.copy(path, tmp_path)
    (tmp_path / "viewer-token").write_text(TOKEN, encoding="utf-8")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml", where=tmp_path)


@needs_promtool
def test_what_orchestrator_and_agent_tell_keeps_prometheus_conventions():
    small = synthetic.Sizes(nodes=40, largest=64, jobs=3, ranks=16, closed=5)
    families = [*told(synthetic.cluster(small)), *exposition.of_process()]
    assert promtool("check", "metrics", given=exposition.text(families)).strip() == ""
    own = exposition.text(agent_metrics.families(agent_facts()))
    assert promtool("check", "metrics", given=own).strip() == ""


@needs_promtool
def test_every_question_of_the_dashboard_can_be_asked(tmp_path: Path):
    board = json.loads((ROOT / "deploy/grafana/keepstep.json").read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    assert len(asked) > 20
    # As rules, because those promtool reads without a server.
    rules = [
        {"record": f"q:{n}", "expr": expr.replace("$job_name", ".*")}
        for n, expr in enumerate(asked)
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "q", "rules": rules}]}), encoding="utf-8")
    assert f"{len(asked)} rules found" in promtool("check", "rules", str(path))


# --- the largest fleet ----------------------------------------------------------------------------


class Served:
    """Where it is, and whom it leads or follows."""

    def __init__(self) -> None:
        self.url = ""
        self.cluster = state.new_cluster("made up")
        self.connected: dict[NodeId, Any] = {}
        self.leader = ""
        """Whom it follows from now on; empty: it leads."""


@contextmanager
def served(directory: Path, sizes: synthetic.Sizes = synthetic.Sizes()) -> Iterator[Served]:
    """A real API handler and HTTP server over a made-up cluster, of 12,500 nodes by default."""
    loop = asyncio.new_event_loop()
    quiet = lambda *_, **__: None  # noqa: E731
    found = Served()
    stop = asyncio.Event()
    ready = threading.Event()

    async def lead() -> None:
        journal = SqliteJournal(directory / "journal.db")
        orchestrator = Orchestrator(journal, OrchestratorConfig(), RealClock(), TOKEN, quiet)
        now = orchestrator.now()
        found.cluster = orchestrator.cluster = synthetic.cluster(sizes, now=now)
        orchestrator._alive.heartbeats.update(synthetic.heartbeats(orchestrator.cluster))
        found.connected = orchestrator._streams
        found.connected.update(dict.fromkeys(orchestrator.cluster.nodes))
        gate = Gate(Tokens(TOKEN))
        api = Api(orchestrator, journal, gate, {}, quiet)

        async def handle(request: Request) -> Reply:
            if not found.leader:
                return await api.handle(request)
            follower = Follower(cast("SharedJournal", journal), found.url, quiet, gate)
            follower._seen = Look(Term(2), 0, "another", found.leader, 5.0)
            return await follower.handle(request)

        server = HttpServer(handle, connections_max=100)
        found.url = f"http://127.0.0.1:{await server.listen('127.0.0.1', 0)}"
        ready.set()
        await stop.wait()
        await server.close()
        journal.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(lead()), daemon=True)
    thread.start()
    assert ready.wait(SECONDS_MAX)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@pytest.mark.browser
def test_the_page_is_interactive_within_a_second_at_12500_nodes(chromium: Chromium, tmp_path: Path):
    with served(tmp_path) as there:
        page = chromium.page()
        script = f"sessionStorage.setItem('keepstep-token', '{TOKEN}')"
        page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        loads = []
        for _ in range(8):
            # The best of some: what else runs on this machine is not the page's fault.
            page.go(f"{there.url}/?{len(loads)}")
            page.wait(f"location.search === '?{len(loads)}' && document.body.dataset.ready", 20)
            loads.append(page.run("performance.getEntriesByName('ready')[0].startTime"))
            if loads[-1] < READY_MS_MAX:
                break
        print(f"interactive after {', '.join(f'{ms:.0f} ms' for ms in loads)}")
        assert min(loads) < READY_MS_MAX, loads
        assert "12,500" in page.text()
        # It answers to the keyboard at once, and says in words where the cursor is.
        page.run("document.getElementById('map-canvas').focus()")
        page.key("End", 35)
        note = page.wait("/^n12499 /.test(document.getElementById('map-note').textContent)", 10)
        assert note
        page.run("document.getElementById('unwell-part').open = true")
        page.wait("document.querySelectorAll('#racks tbody tr').length === 100", 10)
        label = page.run("document.getElementById('map-canvas').getAttribute('aria-label')")
        assert label.startswith("12,500 nodes, 100,000 devices: ")
        assert "Page Up and Page Down from rack to rack" in label
        assert page.errors() == []
        page.run("document.getElementById('unwell-part').open = false; scrollTo(0, 0)")
        shoot(page, "page-12500-nodes.png", (1600, 1000))
        shoot(page, "page-12500-nodes-dark.png", (1600, 1000), "dark")


# --- the page under the hand ----------------------------------------------------------------------

SMALL = synthetic.Sizes(nodes=40, largest=64, jobs=3, ranks=16, closed=5)
NOTE = "document.getElementById('map-note').textContent"


def opened(chromium: Chromium, url: str) -> Page:
    page = chromium.page()
    script = f"sessionStorage.setItem('keepstep-token', '{TOKEN}')"
    page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.go(url)
    page.wait("document.body.dataset.ready", 20)
    page.run("document.getElementById('map-canvas').focus()")
    return page


@pytest.mark.browser
def test_the_map_is_walked_by_rack_and_a_chosen_node_stays_chosen(
    chromium: Chromium, tmp_path: Path
):
    with served(tmp_path, SMALL) as there:
        page = opened(chromium, f"{there.url}/")
        places = page.run(
            f"fetch('v1/board', {{headers: {{Authorization: 'Bearer {TOKEN}'}}}})"
            ".then((reply) => reply.json()).then((board) => board.fleet.groups)"
        )
        first = [group["nodes"][0] for group in places]
        assert len(first) > 2
        told = []
        for name, code in (("Home", 36), ("PageDown", 34), ("PageDown", 34), ("PageUp", 33)):
            page.key(name, code)
            told.append(page.run(NOTE).partition(" ")[0])
        assert told == [first[0], first[1], first[2], first[1]]
        page.key("Enter", 13)
        page.wait(f"/^{first[1]} at /.test(document.getElementById('node').innerText)", 5)
        region = "document.getElementById('node').getAttribute('role')"
        canvas = "document.getElementById('map-canvas').getAttribute('role')"
        assert (page.run(region), page.run(canvas)) == ("status", "application")
        shoot(page, "page-walked.png")
        # One comes before it: the numbers of all that follow change, and the chosen one does not.
        row = "getComputedStyle(document.getElementById('map-cursor')).top"
        before = page.run(row)
        fresh = NodeId("a0")
        there.cluster.nodes[fresh] = replace(there.cluster.nodes[NodeId(first[1])], node=fresh)
        there.connected[fresh] = None
        page.wait(f"{row} !== '{before}'", 10)
        assert page.run(NOTE).partition(" ")[0] == first[1]
        assert page.errors() == []


@pytest.mark.browser
def test_the_question_for_the_token_cannot_be_put_away(chromium: Chromium, tmp_path: Path):
    with served(tmp_path, SMALL) as there:
        page = chromium.page(f"{there.url}/")
        page.wait("document.getElementById('token').open", 20)
        page.run("window.closings = 0; document.getElementById('token').onclose = () => closings++")
        for _ in range(4):
            page.key("Escape", 27)
            time.sleep(0.1)
        assert page.run("window.closings") > 0, (
            "this browser never closes it: the test tests nothing"
        )
        page.wait("document.getElementById('token').open", 2)
        page.run(f"document.getElementById('token-text').value = '{TOKEN}'")
        page.run("document.querySelector('#token-form button').click()")
        page.wait("document.body.dataset.ready", 20)


@pytest.mark.browser
def test_an_open_page_names_the_new_leader_when_its_own_follows(chromium: Chromium, tmp_path: Path):
    with served(tmp_path, SMALL) as there:
        page = opened(chromium, f"{there.url}/")
        there.leader = "http://127.0.0.1:9"
        page.wait("document.querySelector('#banner a')?.href === 'http://127.0.0.1:9/'", 10)
        assert "does not lead any more" in page.run("document.getElementById('banner').innerText")
        # Browsers load an icon when they have time. What is left of an open page is still here.
        page.run("new Image().src = 'page/icon.svg?late'")
        page.run("fetch('page/map.js').then((reply) => { window.late = reply.status })")
        page.wait("window.late === 200", 5)
        shoot(page, "page-follows.png")
        assert page.errors() == [], "nothing was asked of another origin"
        there.leader = ""
        page.wait("document.getElementById('banner').hidden", 10)
        page.wait("document.getElementById('link').textContent === 'live'", 10)
