"""What version 1 of the wire knew: the fields of its records, the members of its enumerations.

Made from the code of that version (tests/wire/v1/table.json) and never edited: a peer of version 1
is told these, and nothing else. Whatever is not here came later.
"""

from __future__ import annotations

FIELDS: dict[str, str] = {
    "Agree": "",
    "Apply": "boundary ranks",
    "Assign": "spec seat membership homes forms",
    "Cover": "portion first last",
    "DropStandby": "slot",
    "Endpoint": "host port",
    "Entry": "found payload why",
    "Fence": "seats",
    "FetchEntry": "job rank boundary secret",
    "Health": "node severity reason slot seconds",
    "Heartbeat": "node jobs",
    "Hello": "node address slots peer_port store_port boot workers standbys term_seen token labels",
    "Home": "rank endpoints secrets",
    "JobPulse": "job generation step committed step_seconds busy",
    "JobSpec": (
        "job script arguments module nodes ranks_per_node spares priority standby_level "
        "preload environment directory log_directory state_directory tee policy"
    ),
    "Membership": "world_size secret store mirror_stride",
    "Move": "target sources wave staged portion rebuilt",
    "Observed": "node job sign rank incarnation generation step exit_code detail",
    "Order": "term generation order_id job nodes action",
    "PhaseReport": "node job generation phase seats",
    "Policy": (
        "mode hold_seconds_max silent_seconds_max restart_grace_seconds hang_seconds_min "
        "hang_steps hang_settle_seconds startup_seconds_max budget_seconds_min budget_steps "
        "transfer_attempts_max recoveries_max leave_within_seconds unit same_domain lend "
        "lend_seconds_max borrow move_home home_clean_seconds"
    ),
    "Publish": "node job generation rank step path request",
    "Published": "job request accepted why",
    "Pulse": "term heads",
    "Quiesce": "why at leaving membership",
    "Reform": "membership boundary digests moves homes groups_alike",
    "Refused": "why",
    "Resume": "boundary",
    "Save": "boundary writers path homes",
    "Seat": "rank node slot incarnation",
    "SeatReport": (
        "rank boundary intact digests ready portions entries state_bytes step unsettled "
        "step_seconds moved_bytes moved_seconds groups busy_seconds problem covers"
    ),
    "StallFact": "rank incarnation step launched stopped",
    "Stalled": "node job generation ranks seconds",
    "StandbyFact": "job slot level ready",
    "StandbyReady": "job slot level detail",
    "StandbyReport": "node job slot level ready detail",
    "StartStandby": "spec slot",
    "StartWorkers": "spec seats membership resume_from",
    "Stop": "exit_code why",
    "WorkerBroken": "job rank incarnation generation step detail corrupt",
    "WorkerEnding": "job rank incarnation generation sign step detail",
    "WorkerFact": "job rank slot incarnation generation",
    "WorkerHello": "job slot pid rank incarnation generation level",
    "WorkerReport": "job generation phase seat",
}
MEMBERS: dict[str, str] = {
    "Mode": "act observe",
    "Phase": (
        "warm agree allocate quiesce reform transfer verify resume done hold save fallback stopped"
    ),
    "SameDomain": "require prefer swap_whole",
    "Severity": "avoid leave imminent",
    "Sign": "exit exception finished hang broken corrupt store_lost",
    "Unit": "device node domain",
}
