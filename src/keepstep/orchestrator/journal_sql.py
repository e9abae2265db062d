"""What the journal in PostgreSQL says to its database: every statement, and nothing else.

A write locks the one row of `standing`, and adds its rows only if term and head are the writer's:
LEAD is the first half of both kinds. A snapshot's text comes before, in a row that has the term in
place of the link's number, below zero: nobody reads it until VOUCH has put the number there. Times
are the database's alone. Rows travel as one JSON document: the driver writes arrays item by item,
in Python, which was a quarter of a busy leader.
"""

PREPARE = """
SELECT set_config('statement_timeout', '10s', false),
    set_config('lock_timeout', '5s', false),
    -- A write in doubt, or one of a stopped leader, must not keep the row locked.
    set_config('idle_in_transaction_session_timeout', '10s', false),
    -- What a machine held that lost its power (an offer to lead) is gone soon after it.
    set_config('tcp_keepalives_idle', '10', false),
    set_config('tcp_keepalives_interval', '5', false),
    set_config('tcp_keepalives_count', '3', false),
    set_config('default_transaction_isolation', 'read committed', false),
    -- An order leaves after its step is on disk; stricter settings of the server stay.
    set_config('synchronous_commit',
        CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on'
        ELSE current_setting('synchronous_commit') END, false)
"""
LEISURE = "SELECT set_config('statement_timeout', %s, false)"
HURRY = "SELECT set_config('lock_timeout', %s, false)"
CLOCK_WENT_BACK = "written_at > clock_timestamp() + interval '5 s'"
"""A write is never later than now: this database's clock is another than the one before. It was
promoted, or put back, on a machine whose clock is behind, and a lease by the clock before would
last for as long as that is. A clock that is merely set right, by less, ends no lease. The length of
the lease says nothing: its holder may have another setting than whoever looks."""
BEGIN = f"""
WITH before AS (
    SELECT expires_at, written_at FROM keepstep.standing
    WHERE (%(returning)s AND holder = %(holder)s) OR expires_at <= clock_timestamp()
        OR {CLOCK_WENT_BACK}
    FOR UPDATE  -- Of nobody whose lease goes on.
)
UPDATE keepstep.standing s
SET term = greatest(s.term, %(above)s) + 1, holder = %(holder)s,
    endpoint = %(endpoint)s, endpoint_term = greatest(s.term, %(above)s) + 1,
    expires_at = clock_timestamp() + make_interval(secs => %(lease)s),
    written_at = clock_timestamp()
FROM before  -- Anybody's last write: who writes no written_at has a lease all the same.
RETURNING s.term, CASE WHEN before.expires_at = '-infinity' THEN 0.0 ELSE
    greatest(0.0, extract(epoch FROM clock_timestamp() - CASE  -- No lease is longer.
        WHEN before.written_at >= before.expires_at - make_interval(secs => %(longest)s)
        THEN before.written_at
        ELSE before.expires_at - make_interval(secs => %(lease)s) END)::float8) END
"""
LEASE = f"""
SELECT term, holder, CASE WHEN {CLOCK_WENT_BACK} THEN 0.0 ELSE extract(epoch FROM
    -- By now its holder may have let go of it, or an older Keepstep have left -infinity there.
    greatest(expires_at, clock_timestamp()) - clock_timestamp())::float8 END,
    seq, CASE WHEN endpoint_term = term THEN endpoint ELSE '' END
FROM keepstep.standing
"""
OFFER = "SELECT pg_advisory_lock_shared(%s)"
TAKE_BACK = "SELECT pg_advisory_unlock_shared(%s)"
OFFERED = """
SELECT FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 1 AND pid <> pg_backend_pid()
    AND (classid::bigint << 32) + objid::bigint = %s
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
LIMIT 1
"""
PROLONG = """
UPDATE keepstep.standing
-- Not written_at: nothing is decided meanwhile, and whoever takes over has to know since when.
SET expires_at = greatest(expires_at, clock_timestamp() + make_interval(secs => %(lease)s))
-- A lease that is over, or was let go of, stays so.
WHERE term = %(term)s AND expires_at > clock_timestamp()
"""
LET_GO = """
UPDATE keepstep.standing SET expires_at = clock_timestamp(), written_at = clock_timestamp()
WHERE term = %s
"""
STANDING = """
SELECT s.term, s.seq, s.head, s.holder, h.chain, h.number, h.hash
FROM keepstep.standing s LEFT JOIN keepstep.heads h ON true
"""
LEAD = """
WITH lead AS (
    UPDATE keepstep.standing
    SET seq = %(seq)s, head = %(head)s,
        expires_at = clock_timestamp() + make_interval(secs => %(lease)s),
        written_at = clock_timestamp()
    WHERE term = %(term)s AND head = %(expected)s
    RETURNING term
), linked AS (
    INSERT INTO keepstep.links (chain, number, hash, seq, body)
    SELECT new.* FROM lead, json_to_recordset(%(links)s::json)
        AS new(chain text, number bigint, hash text, seq bigint, body text)
), headed AS (
    INSERT INTO keepstep.heads (chain, number, hash)
    SELECT new.* FROM lead, json_to_recordset(%(heads)s::json)
        AS new(chain text, number bigint, hash text)
    ON CONFLICT (chain) DO UPDATE SET number = excluded.number, hash = excluded.hash
),"""
APPEND = (
    LEAD
    + """
entered AS (
    INSERT INTO keepstep.entries (seq, body)
    SELECT new.* FROM lead, json_to_recordset(%(entries)s::json) AS new(seq bigint, body text)
)
SELECT term FROM lead
"""
)
BRING = """
INSERT INTO keepstep.snapshots (seq, link, body) VALUES (%(at_seq)s, %(brought)s, %(body)s)
-- Not over one that the chain vouches for, nor over one of a later term.
ON CONFLICT (seq) DO UPDATE SET link = excluded.link, body = excluded.body
WHERE snapshots.link BETWEEN excluded.link AND -1
"""
VOUCH = (
    LEAD
    + """
kept AS (
    -- The text stays where it is: only the number of its link is written.
    UPDATE keepstep.snapshots SET link = %(link)s FROM lead
    WHERE snapshots.seq = %(at_seq)s AND link = %(brought)s
    RETURNING snapshots.seq
), forgotten AS (
    -- This statement does not see its own update: it keeps one less of the others, and all of them
    -- if the text is gone, as after a change to a server that is behind. What was brought and never
    -- vouched for is of leaders that are gone.
    DELETE FROM keepstep.snapshots USING kept
    WHERE snapshots.seq > 0 AND snapshots.seq <> %(at_seq)s AND snapshots.seq NOT IN (
        SELECT seq FROM keepstep.snapshots WHERE seq <> %(at_seq)s AND link > 0 ORDER BY seq DESC
        LIMIT %(others)s)
)
SELECT term FROM lead
"""
)
TAIL = "SELECT seq, body FROM keepstep.entries WHERE seq > %s ORDER BY seq LIMIT %s"
PAGE = """
SELECT number, hash, coalesce(links.body, entries.body)
FROM keepstep.links LEFT JOIN keepstep.entries USING (seq)
WHERE chain = %s AND number > %s ORDER BY number LIMIT %s
"""
