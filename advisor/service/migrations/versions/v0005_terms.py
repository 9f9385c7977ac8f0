"""What a lookup among many records is narrowed and ordered by."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import sqlalchemy as sa
from alembic import op

from advisor.cache.key import terms_of
from advisor.cache.name import command_part

revision, down_revision = "0005", "0004"
BYTEWISE = sa.String().with_variant(sa.String(collation="C"), "postgresql")
NEW = ("code", "family", "command", "terms")
AT_ONCE = 500


def upgrade() -> None:
    for name in NEW:
        none = sa.text("''")
        op.add_column("items", sa.Column(name, BYTEWISE, nullable=False, server_default=none))
    _fill(op.get_bind())
    for name in ("items_of_model", "items_of_target", "items_of_origin", "ix_items_file"):
        op.drop_index(name, "items")
    for name in ("model", "target", "file", "family", "command"):
        op.create_index(f"items_of_{name}", "items", [name, "terms", "created"])
    for name in ("origin", "code"):
        op.create_index(f"items_of_{name}", "items", [name, "target", "terms", "created"])


def _fill(connection: sa.Connection) -> None:
    of_keys = sa.text("SELECT key FROM items WHERE fields != '' ORDER BY key")
    keys = list(connection.scalars(of_keys))
    items = sa.table("items", *map(sa.column, ("key", "fields", "data", *NEW)))
    change = items.update().where(items.c.key == sa.bindparam("at"))
    values: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in NEW}
    for start in range(0, len(keys), AT_ONCE):
        query = sa.select(items.c.key, items.c.fields, items.c.data)
        rows = connection.execute(query.where(items.c.key.in_(keys[start : start + AT_ONCE])))
        connection.execute(change.values(values), [_new(*row) for row in rows])


def _new(key: str, fields: str, data: bytes) -> dict[str, Any]:
    record = msgpack.unpackb(msgpack.unpackb(data)["record"])
    return {
        "at": key,
        "new_code": record["target"].get("code", ""),
        "new_family": record.get("family", ""),
        "new_command": command_part(record["key"]["task"].get("command", ())),
        "new_terms": terms_of(json.loads(fields)),
    }
