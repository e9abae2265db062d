"""Words of our own sentences: a job that is called like one of them is found everywhere. Pure.

A sentence that names another project's job is withheld from a project, and names are found by
looking at its words. So a project cannot call a job like such a word: others would not get to read
what is told of their own. Whoever runs the cluster may, but then the name hides nothing.
"""

from __future__ import annotations

import builtins
import re

_NUMBER = re.compile(r"[A-Za-z]{0,2}[0-9][0-9._-]*[A-Za-z]?")
"""Of a rank, a step or a generation; 5s, g3, and i12 for an incident."""


def ours(name: str) -> bool:
    """Whether a name is a letter, a number or a word that sentences about anybody may have in them;
    among those are the names of Python's own errors."""
    word = name.strip("._-")
    return (
        len(word) < 2
        or not re.search("[A-Za-z]", word)
        or _NUMBER.fullmatch(word) is not None
        or word.lower() in WORDS
        or hasattr(builtins, word)
    )


_LIST = """
abandoned aborted about above accumulate act add address adopted after afterwards again against
agent agents ago agree agreed ahead alertmanager aligned alive all allocate allowed alone already
among an and anew another answer answered answers any application apply are arguments as ask asked
asking assign assumed at attempt attempts authorization average avoid away back backend backup
backward bad bad-memory batches be bearer been before began begin beginning begins begun behind
being believed belong beside between bin blame blamed block body boot both boundary brain bring
broke broken budgets buffer buffers build built busy but by bytes call called came can cancel
cannot capsule caused causes certificate cgroup change changed changes characters charset checked
checkpoint checksum child choose closed closure cluster code collective collectives come comes
coming command committed common complete completed compute confirmed connect connected connection
connection-reset contaminated content-length content-type copy corrupt could counted counter cover
covers cp cpp culprit current cursor cut data database dataset days dead decide decided decides
declare declared default destroyed detail dev device device-lost devices dict dicts did died dies
differ different differs digest dim directory disk dismiss do does domain done doubts drain
drained draining draw drawn drop dropped each earlier either element else elsewhere empty end
ended ending endpoint ends entered entries entry environment errand error evaluate evaluation
event ever every evidence exactly exception exchange exit exited expected expired failed fallback
fallbacks falls far fault faults fell fence fenced fences fencing few file finds finished first
fit followed follows for forecasts forgot forgotten forks formed found frame free from frozen full
function functions fused gaps generation generator get give given gives gloo go goes going gone
good got gradients greeting group groups had half hand hang hangs happen has have head health
heard heartbeats held hello help here hold holders holds home homes host how http https id if
ignored imminent import imports in incarnation incident incidents indices inf init inside install
instead into is it iterable its itself job jobs join joiner joining journal json keep keeps
keepstep keepstep-stream kept kernel keys kill killed kills kind know known knows ks label labels
lack lag laggard lags last late lately layer lead leads least leave leaver leavers leaving led
left lent less let level like limits line lines linked list listen listener listens lists lives
living load loaded loader loan loans log look look-at-it looked looking loop loss lost machine
made majority make makes manifest max may mb meaning meanwhile measured median member memory
message met meta method metrics mid-run middle migrate migrating migration min mirror missing mode
model module moment moments more most move moved moves much must my name named names namespace
need needed needs neighbour never new newer newest next nice no nobody node nodes none not notes
nothing now nowhere ns numbers obeyed object observe of ok older on once one ones only open opened
operation operator optimizer optimizers or orchestrator orchestrators order orders other others
our ourselves out outages outcome outgrown output over own owner paces pair parameter parameters
park parked part partial parts pass passes patches path paths peer peers per phase piece pipe
place plain planned pod policy port portion portions post prefer preload prepared priority private
proc process program progress project protected pt published purpose put python question quiesce
quiescing rack raised raises ran random rank ranks re-formed reach reached read reads ready reap
rebooted rebuilds rebuilt receive receives record recover recoveries recovering reform refused
register registered registry rehearsing release released remedies rendezvous replace replaced
replayed replicated report reported request require rerun reseat reset rest restart restarted
restarting restore resume resumed resumes retried return rewound room round row rows run running
runpy runs said same save saved saves saving say says script seat seats second seconds secret
section see seed seeds seen serve server serves session set settings several shall shape shared
shares shm short shorter should show sign signal sigterm silence silent since size sizes slot
slots slower slowest slurm smallest snapshot so socket some somebody something source sources
spare spares sparse speak speaks spoke staged stale stall stand standby standby-level standbys
start started starting starts stat state states status stays step steps still stop stopped store
story stray stream strings such supposed sure survives surviving survivors suspect suspected swap
switch tag taint tainted taints take taken takes taking talk target targets tell tensor tensors
term text than that the their them themselves then there these they this those thread threads
through tie time timeout times tmpfs to together told too took torch touched training transfer
trouble true tuples turn twice two type ulimit uncovered under undrain unfound unfreeze unfrozen
unique unit unknown unplanned unreaped unscales unset unsure untaint until up update updates
upgrade use used user uses using value values verified verify version very vote vouching wait
waited waiting waits wanted warm warming warning was watch watches wave way we weight-changed
weights well were what when where whether which while who whoever whole whom whose why will wish
with within without word words worker workers world would wrap writable write writes written wrong
wrote xid yet zeroredundancyoptimizer
"""

WORDS = frozenset(_LIST.split())
"""In lower case. The tests find what is missing, and add it (tests/unit/test_words.py)."""
