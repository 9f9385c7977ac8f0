CREATE TABLE schema (
    id SERIAL NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE tokens (
    id SERIAL NOT NULL,
    digest BYTEA NOT NULL,
    name VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    created DOUBLE PRECISION NOT NULL,
    expires DOUBLE PRECISION,
    revoked DOUBLE PRECISION,
    used DOUBLE PRECISION,
    PRIMARY KEY (id),
    UNIQUE (digest)
);
CREATE TABLE events (
    id SERIAL NOT NULL,
    at DOUBLE PRECISION NOT NULL,
    token INTEGER,
    action VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    address VARCHAR NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(token) REFERENCES tokens (id)
);
CREATE INDEX ix_events_at ON events (at);
CREATE TABLE items (
    key VARCHAR COLLATE "C" NOT NULL,
    place VARCHAR COLLATE "C" NOT NULL,
    model VARCHAR COLLATE "C" NOT NULL,
    id VARCHAR COLLATE "C" NOT NULL,
    batch BIGINT NOT NULL,
    target VARCHAR COLLATE "C" NOT NULL,
    origin VARCHAR COLLATE "C" NOT NULL,
    called VARCHAR NOT NULL,
    file VARCHAR COLLATE "C" NOT NULL,
    device VARCHAR COLLATE "C" NOT NULL,
    fields VARCHAR NOT NULL,
    speedup DOUBLE PRECISION NOT NULL,
    created DOUBLE PRECISION NOT NULL,
    stored DOUBLE PRECISION NOT NULL,
    size INTEGER NOT NULL,
    token INTEGER NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (key),
    FOREIGN KEY(token) REFERENCES tokens (id)
);
CREATE INDEX items_of_id ON items (id, batch);
CREATE INDEX items_of_model ON items (model);
CREATE INDEX items_of_origin ON items (origin);
CREATE INDEX items_of_target ON items (target);
CREATE INDEX ix_items_device ON items (device);
CREATE INDEX ix_items_file ON items (file);
CREATE INDEX ix_items_place ON items (place);
CREATE TABLE sessions (
    digest BYTEA NOT NULL,
    token INTEGER NOT NULL,
    expires DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (digest),
    FOREIGN KEY(token) REFERENCES tokens (id)
);
