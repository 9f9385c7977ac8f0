"""What the database holds."""

from __future__ import annotations

from sqlalchemy import BigInteger, ForeignKey, Index, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

VERSION = 1
"""Of the tables below. A server refuses a database of a newer one."""

_Bytewise = String().with_variant(String(collation="C"), "postgresql")
"""Text that is ordered by its bytes, whatever the language of the database."""


class Base(DeclarativeBase):
    """Every table."""


class Schema(Base):
    """One row: the version that the tables have."""

    __tablename__ = "schema"

    id: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int]


class Item(Base):
    """A version of a record, or a mark on one, under the key that a store has it by.

    Attributes:
        place: what all versions of one record have in common; see `cache.name.Name`.
        called: the target's name; `file` that of its file or module.
        speedup: of the loop's winner. All from `target` to `created` is empty of marks.
        device: its name; `fields` every field of the record's key, as JSON.
        created: when it was measured, in Unix seconds; `stored` when it came here.
        token: whose it is.
    """

    __tablename__ = "items"
    __table_args__ = (
        Index("items_of_model", "model"),
        Index("items_of_id", "id", "batch"),
        Index("items_of_target", "target"),
        Index("items_of_origin", "origin"),
    )

    key: Mapped[str] = mapped_column(_Bytewise, primary_key=True)
    place: Mapped[str] = mapped_column(_Bytewise, index=True)
    model: Mapped[str] = mapped_column(_Bytewise)
    id: Mapped[str] = mapped_column(_Bytewise)
    batch: Mapped[int] = mapped_column(BigInteger)
    target: Mapped[str] = mapped_column(_Bytewise, default="")
    origin: Mapped[str] = mapped_column(_Bytewise, default="")
    called: Mapped[str] = mapped_column(default="")
    file: Mapped[str] = mapped_column(_Bytewise, default="", index=True)
    device: Mapped[str] = mapped_column(_Bytewise, default="", index=True)
    fields: Mapped[str] = mapped_column(default="")
    speedup: Mapped[float] = mapped_column(default=0.0)
    created: Mapped[float] = mapped_column(default=0.0)
    stored: Mapped[float]
    size: Mapped[int]
    token: Mapped[int] = mapped_column(ForeignKey("tokens.id"))
    data: Mapped[bytes]


class Token(Base):
    """Who may do what. Of the token itself only its SHA-256 is kept. Times in Unix seconds."""

    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(primary_key=True)
    digest: Mapped[bytes] = mapped_column(unique=True)
    name: Mapped[str]
    role: Mapped[str]
    created: Mapped[float]
    expires: Mapped[float | None]
    revoked: Mapped[float | None]
    used: Mapped[float | None]


class Session(Base):
    """A browser that was logged in with a token; `digest` of what its cookie holds."""

    __tablename__ = "sessions"

    digest: Mapped[bytes] = mapped_column(primary_key=True)
    token: Mapped[int] = mapped_column(ForeignKey("tokens.id"))
    expires: Mapped[float]


class Event(Base):
    """A line of the audit log: who wrote what, from where, when. Nothing changes or removes one."""

    __tablename__ = "events"

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
    token: Mapped[int | None] = mapped_column(ForeignKey("tokens.id"))
    action: Mapped[str]
    subject: Mapped[str]
    address: Mapped[str]
