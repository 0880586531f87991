-- The store of the control plane. Plain SQL that SQLite and PostgreSQL both take: BIGINT for numbers, TEXT for ids, words
-- and JSON, times in milliseconds since 1970. What cannot be is refused here, whatever the code above does wrong.

CREATE TABLE schema_version (
    one     BIGINT PRIMARY KEY CHECK (one = 1),
    version BIGINT NOT NULL
);
INSERT INTO schema_version (one, version) VALUES (1, 1);

-- What a user owns. `desired` is what is wanted, `state` what is so; every change of state makes `generation` larger.
CREATE TABLE sandboxes (
    id              TEXT PRIMARY KEY,
    project         TEXT NOT NULL,
    name            TEXT NOT NULL,
    desired         TEXT NOT NULL CHECK (desired IN ('running', 'deleted')),
    state           TEXT NOT NULL CHECK (state IN ('creating', 'running', 'paused', 'suspending', 'suspended',
                        'stopping', 'stopped', 'waking', 'failed', 'deleting', 'deleted')),
    reason          TEXT,
    generation      BIGINT NOT NULL CHECK (generation > 0),
    run             BIGINT NOT NULL CHECK (run > 0),
    template_ref    TEXT NOT NULL,
    template_digest TEXT NOT NULL,
    memory_mib      BIGINT NOT NULL,
    vcpus           BIGINT NOT NULL,
    disk_bytes      BIGINT NOT NULL,
    env             TEXT NOT NULL,
    metadata        TEXT NOT NULL,
    created_at_ms   BIGINT NOT NULL,
    updated_at_ms   BIGINT NOT NULL,
    expires_at_ms   BIGINT,
    deleted_at_ms   BIGINT,
    CHECK (state <> 'failed' OR reason IS NOT NULL),
    CHECK (reason IS NULL OR state IN ('failed', 'paused')),
    CHECK ((state = 'deleted') = (deleted_at_ms IS NOT NULL)),
    CHECK ((desired = 'deleted') = (state IN ('deleting', 'deleted')))
);
CREATE UNIQUE INDEX sandboxes_live_name ON sandboxes (project, name) WHERE state <> 'deleted';
CREATE INDEX sandboxes_state ON sandboxes (state);
CREATE INDEX sandboxes_template ON sandboxes (template_digest);
CREATE INDEX sandboxes_expiry ON sandboxes (expires_at_ms) WHERE expires_at_ms IS NOT NULL;

-- For filters only; the answer's metadata is the JSON of the row.
CREATE TABLE metadata (
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    key     TEXT NOT NULL,
    value   TEXT NOT NULL,
    PRIMARY KEY (sandbox, key)
);
CREATE INDEX metadata_pairs ON metadata (key, value);

-- One life of a sandbox on a node. `generation` is the fencing number of calls to the node; `observation` the node's count
-- of the last change that was taken over. A node fences per sandbox: a later run begins with a larger generation.
CREATE TABLE runs (
    sandbox       TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    run           BIGINT NOT NULL CHECK (run > 0),
    node          TEXT,
    state         TEXT NOT NULL CHECK (state IN ('starting', 'running', 'paused', 'gone')),
    generation    BIGINT NOT NULL CHECK (generation > 0),
    observation   BIGINT NOT NULL CHECK (observation >= 0),
    reason        TEXT,
    started_at_ms BIGINT,
    ended_at_ms   BIGINT,
    PRIMARY KEY (sandbox, run),
    CHECK ((state = 'gone') = (ended_at_ms IS NOT NULL))
);

CREATE TABLE operations (
    id             TEXT PRIMARY KEY,
    project        TEXT NOT NULL,
    kind           TEXT NOT NULL CHECK (kind IN ('create_sandbox', 'delete_sandbox', 'build_template')),
    state          TEXT NOT NULL CHECK (state IN ('pending', 'running', 'succeeded', 'failed')),
    sandbox        TEXT,
    spec           TEXT,
    error_code     TEXT,
    error_message  TEXT,
    step           TEXT,
    done           BIGINT NOT NULL DEFAULT 0,
    total          BIGINT NOT NULL DEFAULT 0,
    result_digest  TEXT,
    attempts       BIGINT NOT NULL DEFAULT 0,
    owner          TEXT,
    lease_until_ms BIGINT,
    created_at_ms  BIGINT NOT NULL,
    ended_at_ms    BIGINT,
    CHECK ((state = 'failed') = (error_code IS NOT NULL)),
    CHECK ((error_code IS NULL) = (error_message IS NULL)),
    CHECK ((state IN ('succeeded', 'failed')) = (ended_at_ms IS NOT NULL)),
    CHECK ((kind = 'build_template') = (sandbox IS NULL))
);
CREATE INDEX operations_open ON operations (state) WHERE state IN ('pending', 'running');
CREATE INDEX operations_sandbox ON operations (sandbox);

-- `resource` says what the first request made (an operation, a command, a key); otherwise `status` and `body` are its answer.
CREATE TABLE idempotency (
    project       TEXT NOT NULL,
    key_hash      TEXT NOT NULL,
    request_hash  TEXT NOT NULL,
    resource      TEXT,
    owner         TEXT,
    lease_until_ms BIGINT,
    status        BIGINT,
    body          TEXT,
    created_at_ms BIGINT NOT NULL,
    PRIMARY KEY (project, key_hash)
);
CREATE INDEX idempotency_age ON idempotency (created_at_ms);

-- What the node holds, as it last said. `deleting`: somebody is at it; `missing`: the node no longer lists it.
CREATE TABLE templates (
    digest           TEXT PRIMARY KEY,
    state            TEXT NOT NULL CHECK (state IN ('ready', 'deleting', 'missing')),
    memory_mib       BIGINT NOT NULL,
    vcpus            BIGINT NOT NULL,
    disk_bytes       BIGINT NOT NULL,
    info             TEXT NOT NULL,
    created_at_ms    BIGINT NOT NULL
);
CREATE TABLE template_tags (
    name   TEXT NOT NULL,
    tag    TEXT NOT NULL,
    digest TEXT NOT NULL REFERENCES templates (digest),
    PRIMARY KEY (name, tag)
);
CREATE INDEX template_tags_digest ON template_tags (digest);

CREATE TABLE api_keys (
    id              TEXT PRIMARY KEY,
    name            TEXT NOT NULL,
    scope           TEXT NOT NULL CHECK (scope IN ('admin', 'use', 'read')),
    hash            TEXT NOT NULL UNIQUE,
    created_at_ms   BIGINT NOT NULL,
    last_used_at_ms BIGINT
);
