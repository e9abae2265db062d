"""Alerts that arrive by the webhook: each is followed, or told why not."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from keepstep.orchestrator import alerts
from keepstep.orchestrator.access import Gate
from keepstep.orchestrator.http import Reply, json_response
from keepstep.orchestrator.routes import Call, Route
from keepstep.orchestrator.run import Log, Orchestrator
from keepstep.orchestrator.tokens import Role


class Alerting:
    """The webhook of one orchestrator."""

    def __init__(
        self, orchestrator: Orchestrator, rules: alerts.Rules, gate: Gate, log: Log
    ) -> None:
        self._orchestrator, self._rules, self._gate, self._log = orchestrator, rules, gate, log

    async def follow(self, call: Call) -> Reply:
        """Only a payload that is none is refused."""
        with self._gate.charged(call.caller):
            given = alerts.read(call.body)
            slots = {name: node.slots for name, node in self._orchestrator.cluster.nodes.items()}
            verdicts = alerts.judge(given, self._rules, slots)
        # All at once: they share one write to the journal.
        with self._gate.waits(call.caller):
            done = await asyncio.gather(*(self._follow_one(v, call.caller.name) for v in verdicts))
        return json_response({"alerts": done})

    async def _follow_one(self, verdict: alerts.Verdict, by: str) -> dict[str, Any]:
        told = {"alert": verdict.alert.name, "place": verdict.place or None}
        told["status"] = "firing" if verdict.alert.firing else "resolved"
        if verdict.event is None:
            # Nobody reads the answer to a webhook: whoever wonders looks into our log.
            self._log("alert.ignored", **told, why=verdict.why)
            return {**told, "changed": False, "why": verdict.why}
        decision = await self._orchestrator.decide(dataclasses.replace(verdict.event, by=by))
        return {**told, "changed": decision.changed, "why": decision.why}


ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/webhooks/alertmanager",
        lambda api, call: api.alerting.follow(call),
        "Alerts that mean taints, by the operator's mapping",
        "AlertsDone",
        body="AlertmanagerPayload",
        role=Role.WEBHOOK,
        shared=True,
    ),
)
