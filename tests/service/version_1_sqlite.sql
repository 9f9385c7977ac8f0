CREATE TABLE schema (
    id INTEGER NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE tokens (
    id INTEGER NOT NULL,
    digest BLOB NOT NULL,
    name VARCHAR NOT NULL,
    role VARCHAR NOT NULL,
    created DOUBLE NOT NULL,
    expires DOUBLE,
    revoked DOUBLE,
    used DOUBLE,
    PRIMARY KEY (id),
    UNIQUE (digest)
);
CREATE TABLE events (
    id INTEGER NOT NULL,
    at DOUBLE NOT NULL,
    token INTEGER,
    action VARCHAR NOT NULL,
    subject VARCHAR NOT NULL,
    address VARCHAR NOT NULL,
    PRIMARY KEY (id),
    FOREIGN KEY(token) REFERENCES tokens (id)
);
CREATE INDEX ix_events_at ON events (at);
CREATE TABLE items (
    "key" VARCHAR NOT NULL,
    place VARCHAR NOT NULL,
    model VARCHAR NOT NULL,
    id VARCHAR NOT NULL,
    batch BIGINT NOT NULL,
    target VARCHAR NOT NULL,
    origin VARCHAR NOT NULL,
    called VARCHAR NOT NULL,
    file VARCHAR NOT NULL,
    device VARCHAR NOT NULL,
    fields VARCHAR NOT NULL,
    speedup DOUBLE NOT NULL,
    created DOUBLE NOT NULL,
    stored DOUBLE NOT NULL,
    size INTEGER NOT NULL,
    token INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY ("key"),
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
    digest BLOB NOT NULL,
    token INTEGER NOT NULL,
    expires DOUBLE NOT NULL,
    PRIMARY KEY (digest),
    FOREIGN KEY(token) REFERENCES tokens (id)
);
